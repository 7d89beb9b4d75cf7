// @grpc/grpc-js over the repository's .proto files: ADDRESS, PROTO and SILENCE_S in the environment.
import assert from "node:assert/strict";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const silence = Number(process.env.SILENCE_S);
const definition = loader.loadSync(path.join(process.env.PROTO, "radixfleet/v1/inference.proto"), {
  includeDirs: [process.env.PROTO], keepCase: true, longs: Number, enums: String, oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).radixfleet.v1;
const client = new Inference(process.env.ADDRESS, grpc.credentials.createInsecure(), {
  "grpc.keepalive_time_ms": 10000, "grpc.keepalive_timeout_ms": 5000, "grpc.keepalive_permit_without_calls": 1,
  "grpc.max_send_message_length": 64 * 1024 * 1024, "grpc.max_receive_message_length": 64 * 1024 * 1024,
});

/** All messages of a call, and the error that ended it, if one did. */
function read(request, options = {}, after = () => {}) {
  return new Promise((resolve) => {
    const messages = [];
    const call = client.Generate(request, options);
    call.on("data", (message) => { messages.push(message); after(call, message); });
    call.on("error", (error) => resolve({ messages, error }));
    call.on("end", () => resolve({ messages, error: null }));
  });
}

const text = { text: "Tell me about the weather in Paris." };
const plain = await read({ model: "tiny", prompt: text, sampling: { max_new_tokens: 12, temperature: 0 } });
assert.equal(plain.error, null);
assert.equal(plain.messages[0].event, "started");
assert.equal(plain.messages.at(-1).finished.usage.completion_tokens, 12);

const late = await read({ model: "silent", prompt: text, sampling: { max_new_tokens: 60 } }, { deadline: Date.now() + 500 });
assert.equal(late.error.code, grpc.status.DEADLINE_EXCEEDED);

const left = await read({ model: "tiny", prompt: text, sampling: { max_new_tokens: 1000000 } }, {}, (call, message) => {
  if (message.delta) call.cancel();
});
assert.equal(left.error.code, grpc.status.CANCELLED);

const wrong = await read({ model: "none", prompt: text });
assert.equal(wrong.error.code, grpc.status.NOT_FOUND);

const ids = Array.from({ length: 1000000 }, (_, index) => 3 + (index % 500));
const long = await read({ model: "tiny", prompt: { token_ids: { ids } }, sampling: { max_new_tokens: 1 } });
assert.equal(long.error, null);
assert.equal(long.messages[0].started.prompt_tokens, 1000000);

const began = Date.now();
const silent = await read({ model: "silent", prompt: text, sampling: { max_new_tokens: silence } });
assert.equal(silent.error, null);
assert.ok(Date.now() - began >= silence * 1000 - 500);
client.close();
console.log("done");
