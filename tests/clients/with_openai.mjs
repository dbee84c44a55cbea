// OpenAI's own client for JavaScript.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { assert, Box, errorOf, KEY, LONG, main, MODEL, QUESTION, V1 } from "./checks.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const greedy = { model: MODEL, temperature: 0, max_tokens: 24, messages };
const tools = [zodFunction({ name: "pack", description: "Pack a box.", parameters: Box })];
const called = { ...greedy, max_tokens: 200, tools, tool_choice: "required" };
const create = (options) => client.chat.completions.create(options);

await main("openai", {
  async whole() {
    assert((await create(greedy)).choices[0].message.content.trim());
  },
  async stream() {
    let text = "";
    for await (const chunk of await create({ ...greedy, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
    assert(text === (await create(greedy)).choices[0].message.content);
  },
  async tools() {
    Box.parse(JSON.parse((await create(called)).choices[0].message.tool_calls[0].function.arguments));
  },
  async second_turn() {
    const { message } = (await create(called)).choices[0];
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "packed" };
    assert((await create({ ...greedy, tools, messages: [...messages, message, result] })).choices[0].finish_reason);
  },
  async structured() {
    const response_format = zodResponseFormat(Box, "box");
    assert((await client.chat.completions.parse({ ...greedy, max_tokens: 200, response_format })).choices[0].message.parsed);
  },
  async responses() {
    const answer = await client.responses.create({ model: MODEL, input: QUESTION, max_output_tokens: 24 });
    assert(answer.output_text.trim());
  },
  async wrong_input() {
    assert((await errorOf(() => create({ ...greedy, temperature: -1 }))).param === "temperature");
  },
  async overflow() {
    const error = await errorOf(() => create({ ...greedy, messages: [{ role: "user", content: LONG }] }));
    assert(error.code === "context_length_exceeded", `${error}`);
  },
});
