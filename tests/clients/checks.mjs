// What all JavaScript clients are checked with: as checks.py.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const [URL, MODEL] = process.argv.slice(2);
export const V1 = `${URL}/v1`;
export const KEY = "none";
export const QUESTION = "What is the capital of France?";
export const LONG = "word ".repeat(30_000);

const Size = z.object({ width: z.int().min(1).max(9), height: z.int().min(1).max(9) });
export const Box = z.object({
  colour: z.enum(["red", "green"]),
  size: Size,
  spare: z.array(Size).max(2),
  material: z.enum(["wood", "paper"]).nullable(),
});

export function assert(truth, note = "assertion failed") {
  if (!truth) throw new Error(note);
}

export async function errorOf(action) {
  try {
    await action();
  } catch (error) {
    return error;
  }
  throw new Error("no error");
}

export async function main(name, checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  console.log(JSON.stringify({ package: `${name} (npm)`, version }));
  for (const [check, action] of Object.entries(checks)) {
    let [result, note] = ["passed", ""];
    try {
      await action();
    } catch (error) {
      [result, note] = ["failed", `${error?.name}: ${error?.message}`.replace(/\s+/g, " ").slice(0, 400)];
    }
    console.log(JSON.stringify({ check, result, note }));
  }
}
