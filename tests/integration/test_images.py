"""Images as each kind of client sends them, in front of a real tritonserver: all get what transformers generates."""

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
from support.clients import ask_all, http
from support.serving import CHECKPOINT, ROOT, SMALL, Server, add_model, serve

pytestmark = [pytest.mark.server, pytest.mark.slow]

NUM_TOKENS = 12
SAID: Any = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = "what is it?"


class Served:
    """A server with a model of images, and what it should say."""

    def __init__(self, server: Server, chat: str, completion: str, image: bytes, states: dict[str, str]) -> None:
        self.server, self.chat, self.completion, self.image, self.states = server, chat, completion, image, states
        self.code = base64.b64encode(image).decode()
        self.url = f"data:image/jpeg;base64,{self.code}"  # of another type: the bytes decide


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Not every process that collects this file spends two seconds on transformers.
    import torch
    from PIL import Image
    from quire_engine.frontend.tokenizer import load_tokenizer
    from support.pictures import expand, generate, image_of, make_picture_checkpoint, states_of

    def saved(tensor: torch.Tensor) -> bytes:
        file = BytesIO()
        torch.save(tensor, file)
        return file.getvalue()

    path = tmp_path_factory.mktemp("images")
    tokenizer = load_tokenizer(ROOT / "model_repository" / "tinypy" / "1" / "model")
    tokenizer.chat_template = TEMPLATE
    folder = make_picture_checkpoint(path / "checkpoint", "smolvlm", tokenizer)
    image = image_of(40, 90)
    states, tokenizer = expand("smolvlm", folder, image), load_tokenizer(folder)
    texts = []
    for prompt in (f"user:{states}{QUESTION}\nassistant:", f"a {states} b"):
        token_ids, _ = generate(folder, tokenizer.encode(prompt, add_special_tokens=False), [image], NUM_TOKENS)
        texts.append(tokenizer.decode(token_ids))
    rows, arrays = states_of(folder, image)
    tensors = {"image_embeds": rows, "rows": torch.tensor(arrays["rows"]), "cols": torch.tensor(arrays["cols"])}
    given = {name: base64.b64encode(saved(tensor)).decode() for name, tensor in tensors.items()}
    for name, model in (("vision", folder), ("text", CHECKPOINT)):
        add_model(path / "models", name, {**SMALL, "model": str(model), "max_model_len": 768})
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG")
    with serve("--model-repository", str(path / "models"), "--openai", "--openai-port", "0") as server:
        yield Served(server, *texts, file.getvalue(), given)


def test_a_client_of_vllm_backend(served: Served) -> None:
    image = [served.code]
    text = {"text_input": "a <image> b", "exclude_input_in_output": True, "sampling_parameters": SAID}
    answers = ask_all(served.server, [
        {"model": "vision", "image": image, **text}, {"model": "vision", "image": image, "stream": True, **text},
    ])  # fmt: skip
    assert [answer.text for answer in answers] == [served.completion] * 2
    body = {"text_input": "a <image> b", "image": image, **SAID}
    status, answer = http(served.server, "/v2/models/vision/generate", json.dumps(body).encode())
    assert (status, answer["text_output"]) == (200, f"a <image> b{served.completion}")
    body["image"] = [json.dumps(served.states)]
    status, answer = http(served.server, "/v2/models/vision/generate", json.dumps(body).encode())
    assert (status, answer["text_output"]) == (200, f"a <image> b{served.completion}"), "with its hidden states"


def test_our_own_client(served: Served) -> None:
    from quire_client import Client

    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    inline = {"role": "user", "content": [{"type": "image_url", "image_url": served.url}, turn["content"][1]]}
    with Client(served.server.grpc) as client:
        assert client.generate("vision", "a <image> b", images=[served.image], **SAID).text == served.completion
        assert client.generate("vision", [turn], images=[served.image], **SAID).text == served.chat
        assert client.generate("vision", [inline], **SAID).text == served.chat


def test_openais_client(served: Served) -> None:
    import openai

    with openai.OpenAI(base_url=f"http://{served.server.openai}/v1", api_key="none", max_retries=0) as client:
        part = {"type": "image_url", "image_url": {"url": served.url, "detail": "high"}}
        turns: Any = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
        said = {"temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
        chat = client.chat.completions.create(model="vision", messages=turns, **said)
        assert chat.choices[0].message.content == served.chat
        turns[0]["content"][0] = {"type": "image_embeds", "image_embeds": served.states}
        chat = client.chat.completions.create(model="vision", messages=turns, **said)
        assert chat.choices[0].message.content == served.chat, "with its hidden states"
        turns[0]["content"][0] = part
        item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": served.url, "detail": "auto"},
                                                 {"type": "input_text", "text": QUESTION}]}  # fmt: skip
        answer = client.responses.create(
            model="vision", input=[item], max_output_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.output_text == served.chat
        with pytest.raises(openai.BadRequestError, match="this model takes text alone"):
            client.chat.completions.create(model="text", messages=turns)
        bomb = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(99)).decode()
        part["image_url"] = {"url": f"data:image/png;base64,{bomb}"}
        with pytest.raises(openai.BadRequestError, match="messages: an image cannot be used: ") as error:
            client.chat.completions.create(model="vision", messages=turns)
        assert error.value.param == "messages"
        part["image_url"] = {"url": "http://127.0.0.1/a.png"}
        with pytest.raises(openai.BadRequestError, match="not one of allowed_media_domains"):
            client.chat.completions.create(model="vision", messages=turns)
        part["image_url"] = {"url": served.url}
        with pytest.raises(openai.BadRequestError, match="17 images; limit_mm_per_prompt allows 16"):
            client.chat.completions.create(model="vision", messages=[{"role": "user", "content": [part] * 17}])  # type: ignore[list-item]


def test_anthropics_client(served: Served) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=f"http://{served.server.openai}", api_key="none", max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": served.code}
        content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        turns: Any = [{"role": "user", "content": content}]
        said: Any = {"model": "vision", "messages": turns}
        message = client.messages.create(
            **said, max_tokens=NUM_TOKENS, extra_body={"temperature": 0, "ignore_eos": True}
        )
        assert message.content[0].text == served.chat  # type: ignore[union-attr]
        usage = message.usage
        counted = client.messages.count_tokens(**said)
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
