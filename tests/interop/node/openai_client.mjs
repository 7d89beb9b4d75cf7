// The openai package for Node: BASE_URL in the environment. Throws where an answer is not what it should be.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about the weather in Paris." }];

const models = await client.models.list();
assert.ok(models.data.some((model) => model.id === "tiny"));

const whole = await client.chat.completions.create({ model: "tiny", messages, max_tokens: 12, temperature: 0 });
assert.equal(whole.usage.completion_tokens, 12);
assert.equal(whole.choices[0].finish_reason, "length");

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model: "tiny", messages, max_tokens: 12, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, 12);
assert.ok(usage.prompt_tokens_details.cached_tokens >= 0);

// The helper that puts a stream together itself.
const runner = client.chat.completions.stream({ model: "tiny", messages, max_tokens: 12, temperature: 0 });
assert.equal(await runner.finalContent(), text);

const asked = { model: "tiny", input: messages, max_output_tokens: 12, temperature: 0 };
const response = await client.responses.create(asked);
assert.equal(response.output_text, text);
assert.equal(response.incomplete_details.reason, "max_output_tokens");
const types = [];
for await (const event of await client.responses.create({ ...asked, stream: true })) types.push(event.type);
assert.equal(types[0], "response.created");
assert.equal(types.at(-1), "response.incomplete");
assert.equal((await client.responses.stream(asked).finalResponse()).output_text, text);

const completion = await client.completions.create({ model: "tiny", prompt: ["a", "b"], n: 2, max_tokens: 4, seed: 1 });
assert.deepEqual(completion.choices.map((choice) => choice.index), [0, 1, 2, 3]);

const likely = await client.chat.completions.create({ model: "tiny", messages, max_tokens: 3, logprobs: true, top_logprobs: 2 });
assert.equal(likely.choices[0].logprobs.content[0].top_logprobs.length, 2);

await assert.rejects(client.chat.completions.create({ model: "gpt-4", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model: "tiny", messages, n: 1000 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "n");
  assert.ok(error.requestID);
  return true;
});

const city = { type: "object", properties: { city: { enum: ["Bern", "Basel"] } }, required: ["city"] };
const calling = client.chat.completions.stream({
  model: "computed",
  messages,
  temperature: 0,
  tools: [{ type: "function", function: { name: "weather", parameters: city } }],
  tool_choice: "required",
  parallel_tool_calls: false,
});
let told = "";
calling.on("tool_calls.function.arguments.delta", (event) => (told += event.arguments_delta));
const [call] = (await calling.finalMessage()).tool_calls;
assert.equal(call.function.arguments, told);
assert.ok(["Bern", "Basel"].includes(JSON.parse(told).city));

// Leaving a stream in the middle ends the request in the fleet: the caller of this script looks.
const endless = await client.chat.completions.create({ model: "tiny", messages, max_tokens: 1000000, stream: true });
for await (const chunk of endless) {
  if (chunk.choices[0]?.delta?.content) break;
}
const whenAborted = new AbortController();
setTimeout(() => whenAborted.abort(), 200);
await assert.rejects(
  client.chat.completions.create({ model: "silent", messages, max_tokens: 60 }, { signal: whenAborted.signal }),
  OpenAI.APIUserAbortError,
);
console.log("done");
