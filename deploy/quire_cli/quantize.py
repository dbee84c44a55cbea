"""`quire quantize`: writes a checkpoint with quantised weights, as compressed-tensors stores them.

::

    int4   pack-quantized   weight_packed  [N, K / 8] int32: 8 codes each, the lowest bits first; 8 is zero
                            weight_scale   [N, K / group_size]      weight_shape  [2] int64
    int8   int-quantized    weight         [N, K] int8              weight_scale  [N, 1] float32

Linear layers are quantised, as the setting `quantization` quantises them when a model is loaded; the head, routers and
all that is not the text model stay as they are. With a text to calibrate by, the rounding of a column of a 4-bit weight
is made up for by the columns after it (GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323).
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from quire_engine.models.checkpoints.files import read_json
from quire_engine.models.checkpoints.safetensors import PICKLES, weight_files
from quire_engine.models.layers.parallel import Packable, load_targets
from quire_engine.models.linear.int8 import GROUP_SIZES
from quire_engine.models.loader import META, UNQUANTISED, build, check_finite, check_weights
from quire_engine.worker.forward.recorded import RECORDED_TOKENS
from quire_kernels import quantize_grouped
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError, UsageError
from quire_cli.evaluate import checked_config, explained_errors, read_text, score

INDEX = "model.safetensors.index.json"
GROUP_SIZE = GROUP_SIZES[0]
CALIBRATION_TOKENS = 16384
BLOCK = 1024
"""Input features whose products with each other are known: all pairs of a layer of 14,336 would take 800 MB."""
CHUNK = 64
"""Columns that are rounded before those of the rest of the block are corrected, by one matrix product."""
DAMPING = 0.01
"""Of the mean square of the inputs, as in GPTQ."""
_WEIGHTS = {
    "int4": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE},
    "int8": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def quantize(
    model: Path,
    out: Path,
    quantization: str,
    *,
    calibration: Path | None,
    text_file: Path | None,
    num_tokens: int,
    window: int,
) -> None:
    """Write a quantised copy of a checkpoint, and print the perplexity of a text before and after.

    Args:
        model: an unquantised checkpoint.
        out: the folder to make.
        quantization: `int4` or `int8`.
        calibration: a text to calibrate `int4` by.
        text_file: to evaluate; see `quire_cli.evaluate.read_text`.
        num_tokens: of the text, at most; 0: nothing is evaluated.
        window: see `quire_cli.evaluate`.

    Raises:
        CommandError: the checkpoint cannot be quantised, or the copy cannot be written.
        UsageError: `out` exists, there is no such quantisation, or the text cannot be read.
    """
    if quantization not in _WEIGHTS:
        raise UsageError(f"--quantization is {quantization}; it must be one of {', '.join(_WEIGHTS)}")
    if os.path.lexists(out):
        raise UsageError(f"{out} exists; name a folder that does not")
    if calibration is not None and quantization != "int4":
        raise UsageError(f"--calibration is given with --quantization {quantization}; it is for int4")
    text = read_text(text_file, num_tokens) if num_tokens else None
    learned = None if calibration is None else read_text(calibration, CALIBRATION_TOKENS)
    with explained_errors():
        folder = Path(checked_config(model, {}, window).model.model)
        _linear_tensors(folder, quantization)  # rejects what cannot be quantised, before minutes have passed
        before = None if text is None else score(model, {}, text, num_tokens, window).perplexity
        moments = Moments()
        if learned is not None:
            with nn.modules.module.register_module_forward_pre_hook(moments.before_module):
                score(model, {}, learned, CALIBRATION_TOKENS, window, moments.start)
        with waiting_line(Console(), f"quantizing {model}", announce=False) as waiting:
            write_quantized(folder, out, quantization, waiting.tick, moments)
        sizes = [sum(file.stat().st_size for file in weight_files(one)) / 1e6 for one in (folder, out)]
        print(f"{out}: {sizes[1]:.0f} MB of weights, {sizes[0]:.0f} before")
        if text is not None:
            after = score(out, {}, text, num_tokens, window).perplexity
            print(f"perplexity {after:.4f}, {before:.4f} before; of {text.name}")


class Moments:
    """Sums of the products of a layer's input features with each other, in blocks."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[torch.Tensor]] = {}
        """By layer: [B, B] each."""
        self._has_started = False

    def start(self) -> None:
        """Observe from now on; what ran before is no text."""
        self._has_started = True

    def before_module(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """A hook of modules: observe the inputs of linear layers, by the names of their first projections. Experts that
        tokens are routed to are not called as modules."""
        if isinstance(module, Packable) and module.activation_bits == 8:
            self.observe(module.names[0], inputs[0])

    def observe(self, name: str, x_TK: torch.Tensor) -> None:
        """Add the inputs of a layer. Small steps are recorded, which would fail with a product of torch's."""
        if self._has_started and len(x_TK) > RECORDED_TOKENS:
            products = [part_TB.T @ part_TB for part_TB in torch.split(x_TK.float(), BLOCK, dim=1)]
            for known, new in zip(self.blocks.setdefault(name, products), products, strict=True):
                if known is not new:
                    known += new


def write_quantized(
    folder: Path, out: Path, quantization: str, report: Callable[[int], None], moments: Moments | None = None
) -> None:
    """Write a quantised copy of a checkpoint. If it fails or is interrupted, nothing is left.

    Args:
        folder: an unquantised checkpoint.
        out: the folder to make; it appears when it is complete.
        quantization: `int4` or `int8`.
        report: called with the share that is done, in percent.
        moments: of the inputs of linear layers, for `int4`; those that are missing are not calibrated.

    Raises:
        CommandError: the checkpoint cannot be quantised.
        CheckpointError: it is damaged.
        OSError: a file cannot be read or written.
    """
    chosen = _linear_tensors(folder, quantization)
    files = weight_files(folder)
    config, ignored, total, done = read_json(folder / "config.json"), {"lm_head"}, 0, 0
    weight_map: dict[str, str] = {}
    num_bytes = sum(file.stat().st_size for file in files) or 1
    with _temporary(out) as made:
        for file in files:
            tensors: dict[str, torch.Tensor] = {}
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it cannot be iterated)
                    tensor = opened.get_tensor(name)
                    done += tensor.nbytes
                    if name in chosen:
                        check_finite(tensor, tensor, f"{file}: tensor {name}")
                        blocks = moments.blocks.get(chosen[name]) if moments is not None else None
                        tensors |= _quantized(name.removesuffix(".weight"), tensor, quantization, blocks)
                    else:
                        tensors[name] = tensor
                        if name.endswith(".weight") and tensor.dim() == 2 and "embed" not in name:
                            ignored.add(name.removesuffix(".weight"))
                    report(100 * done // num_bytes)
            save_file(tensors, made / file.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
            total += sum(tensor.nbytes for tensor in tensors.values())
        if (folder / INDEX).exists():
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (made / INDEX).write_text(json.dumps(index, indent=2))
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "quantization_status": "compressed",
            "format": "pack-quantized" if quantization == "int4" else "int-quantized", "ignore": sorted(ignored),
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {**_WEIGHTS[quantization], "dynamic": False},
                "input_activations": _ACTIVATIONS if quantization == "int8" else None,
            }},
        }  # fmt: skip
        (made / "config.json").write_text(json.dumps(config, indent=2))
        for file in folder.iterdir():
            is_weight = file.suffix in (".safetensors", ".gguf", *PICKLES)
            if file.is_file() and not is_weight and file.name not in (INDEX, "config.json"):
                shutil.copyfile(file, made / file.name)


def _linear_tensors(folder: Path, quantization: str) -> dict[str, str]:
    """The names in the files of the matrices to quantise, and of the layers whose inputs they have (`Moments`)."""
    from quire_engine.models.checkpoints.config import CheckpointConfig
    from quire_engine.models.decoder import Decoder
    from quire_engine.models.served import read_checkpoint

    config = read_checkpoint(folder)
    if not isinstance(config, CheckpointConfig):
        raise CommandError(f"{folder}: {config.architecture} runs with transformers' own code, and is not quantised")
    if config.weight_format.method != "unquantised":
        raise CommandError(f"{folder}: its weights are {config.weight_format.method} already; take the original")
    tensors = check_weights(folder, config)
    group_size = GROUP_SIZE if quantization == "int4" else 1
    names: dict[str, str] = {}
    layers: dict[int, str] = {}
    for name, target in load_targets(build(lambda: Decoder(config, 1), torch.float32, META, UNQUANTISED)).items():
        module, tensor = target.module, tensors[name]
        layer = layers.setdefault(id(module), name.removesuffix(".weight"))
        # A module with a `packed_of` of its own multiplies its weight into others.
        is_linear = module is not None and module.activation_bits == 8 and type(module).packed_of is Packable.packed_of
        if is_linear and name.endswith(".weight") and tensor.matrix is None and target.shape[1] % group_size == 0:
            names[tensor.name] = layer
    if not names:
        raise CommandError(f"{folder}: no matrix has input features in groups of {group_size}; nothing to quantise")
    return names


def _quantized(
    name: str, weight_NK: torch.Tensor, quantization: str, blocks: list[torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The tensors of a layer."""
    if quantization == "int8":
        scales = weight_NK.float().abs().amax(1, keepdim=True).clamp_(min=1e-10) / 127
        return {
            f"{name}.weight": (weight_NK / scales).round_().to(torch.int8),
            f"{name}.weight_scale": scales,
        }
    if blocks is None:
        found = quantize_grouped(weight_NK, GROUP_SIZE)
        codes_NK = found.codes
    else:
        found = quantize_grouped(weight_NK, GROUP_SIZE, torch.cat([block.diagonal() for block in blocks]))
        codes_NK = _calibrated(weight_NK, found.group_scales(), blocks)
    return {
        f"{name}.weight_packed": (codes_NK[:, 0::2] | codes_NK[:, 1::2] << 4).contiguous().view(torch.int32),
        f"{name}.weight_scale": found.scales.to(weight_NK.dtype),
        f"{name}.weight_shape": torch.tensor(weight_NK.shape),
    }


def _calibrated(weight_NK: torch.Tensor, scales_NG: torch.Tensor, blocks: list[torch.Tensor]) -> torch.Tensor:
    """Codes, uint8 [N, K], by algorithm 1 of GPTQ in each block of input features."""
    weight_KN, scales_GN = weight_NK.t().float().contiguous(), scales_NG.t().contiguous()
    codes_KN = torch.empty_like(weight_KN, dtype=torch.uint8)
    for number, block in enumerate(blocks):
        size, begin = len(block), number * BLOCK
        rest_BN = weight_KN[begin : begin + size]  # is corrected in place
        mean = block.diagonal().mean().clamp(min=1e-12)
        damped = (block + torch.eye(size) * (DAMPING * mean)).double()
        factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()
        for first in range(0, size, CHUNK):
            last = min(first + CHUNK, size)
            errors_CN = torch.empty(last - first, weight_KN.shape[1])
            for k in range(first, last):
                scale_N = scales_GN[(begin + k) // GROUP_SIZE]
                code_N = torch.where(scale_N == 0, 0.0, rest_BN[k] / scale_N).round_().clamp_(-8, 7)
                codes_KN[begin + k] = (code_N + 8).to(torch.uint8)
                error_N = torch.div(rest_BN[k] - code_N * scale_N, factor[k, k], out=errors_CN[k - first])
                rest_BN[k + 1 : last] -= torch.outer(factor[k, k + 1 : last], error_N)
            rest_BN[last:] -= factor[first:last, last:].T @ errors_CN
    return codes_KN.t()


@contextlib.contextmanager
def _temporary(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end of the block, or is removed."""
    made = out.with_name(f".{out.name}.{os.getpid()}")
    made.mkdir(parents=True)
    try:
        yield made
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
