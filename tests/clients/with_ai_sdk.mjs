// Vercel's AI SDK, over chat completions and over Anthropic's messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { assert, Box, errorOf, KEY, LONG, main, MODEL, QUESTION, V1 } from "./checks.mjs";

const quire = createOpenAICompatible({ name: "quire", baseURL: V1, apiKey: KEY, supportsStructuredOutputs: true });
const model = quire(MODEL);
const greedy = { model, temperature: 0, maxOutputTokens: 24, maxRetries: 0, prompt: QUESTION };
const tools = { pack: tool({ description: "Pack a box.", inputSchema: Box }) };
const called = { ...greedy, maxOutputTokens: 200, tools, toolChoice: "required" };

await main("ai", {
  async whole() {
    const { text, usage } = await generateText(greedy);
    assert(text.trim() && usage.outputTokens);
  },
  async stream() {
    let text = "";
    for await (const part of streamText(greedy).textStream) text += part;
    assert(text && text === (await generateText(greedy)).text);
  },
  async tools() {
    Box.parse((await generateText(called)).toolCalls[0].input);
    Box.parse((await streamText(called).toolCalls)[0].input);
  },
  async second_turn() {
    const { toolCalls, response } = await generateText(called);
    const [{ toolCallId, toolName }] = toolCalls;
    const output = { type: "text", value: "packed" };
    const result = { role: "tool", content: [{ type: "tool-result", toolCallId, toolName, output }] };
    const messages = [{ role: "user", content: QUESTION }, ...response.messages, result];
    assert((await generateText({ ...greedy, prompt: undefined, tools, messages })).finishReason);
  },
  async structured() {
    const { output } = await generateText({ ...greedy, maxOutputTokens: 200, output: Output.object({ schema: Box }) });
    Box.parse(output);
  },
  async messages() {
    const anthropic = createAnthropic({ baseURL: V1, apiKey: KEY });
    assert((await generateText({ ...greedy, model: anthropic(MODEL) })).text.trim());
  },
  async wrong_input() {
    assert((await errorOf(() => generateText({ ...greedy, temperature: -1 }))).statusCode === 400);
  },
  async overflow() {
    const error = await errorOf(() => generateText({ ...greedy, prompt: LONG }));
    assert(error.responseBody?.includes("context_length_exceeded"), error.responseBody ?? `${error}`);
  },
});
