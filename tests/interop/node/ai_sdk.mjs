// @ai-sdk/openai-compatible: BASE_URL in the environment. Throws where an answer is not what it should be.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "radixfleet", baseURL: process.env.BASE_URL, includeUsage: true });
const prompt = "Tell me about the weather in Paris.";
const settings = { prompt, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };

const whole = await generateText({ model: provider("tiny"), ...settings });
assert.equal(whole.usage.outputTokens, 12);
assert.equal(whole.finishReason, "length");

const streamed = streamText({ model: provider("tiny"), ...settings });
let text = "";
for await (const part of streamed.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await streamed.usage).outputTokens, 12);

const city = { type: "object", properties: { city: { enum: ["Bern", "Basel"] } }, required: ["city"] };
const tools = { weather: tool({ inputSchema: jsonSchema(city) }) };
const caller = { model: provider("computed"), prompt, temperature: 0, maxRetries: 0, tools, toolChoice: "required" };
const calling = streamText({ ...caller, providerOptions: { radixfleet: { parallel_tool_calls: false } } });
let told = [];
for await (const part of calling.fullStream) if (part.type === "tool-input-delta") told.push(part.delta);
const [call] = await calling.toolCalls;
assert.ok(told.length > 2, "the arguments come as they are generated");
assert.deepEqual(JSON.parse(told.join("")), call.input);
assert.ok(["Bern", "Basel"].includes(call.input.city));
assert.equal(await calling.finishReason, "tool-calls");

const completion = await generateText({ model: provider.completionModel("tiny"), ...settings });
assert.equal(completion.usage.outputTokens, 12);

await assert.rejects(generateText({ model: provider("gpt-4"), ...settings }), (error) => {
  assert.equal(error.statusCode, 404);
  assert.match(error.message, /served are/);
  return true;
});
console.log("done");
