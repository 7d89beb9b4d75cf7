// k6: ADDRESS, HTTP and SILENCE_S in the environment. gRPC by server reflection, and OpenAI's API over HTTP.
import { check } from "k6";
import grpc from "k6/net/grpc";
import http from "k6/http";

export const options = {
  scenarios: {
    load: { executor: "shared-iterations", vus: 8, iterations: 64, exec: "load" },
    edges: { executor: "per-vu-iterations", vus: 1, iterations: 1, exec: "edges", maxDuration: "20m" },
  },
  thresholds: { checks: ["rate==1"], http_req_failed: ["rate==0"] },
};

const METHOD = "radixfleet.v1.Inference/Generate";
const prompt = { text: "Tell me about the weather in Paris." };
const client = new grpc.Client();

/** Reads a stream to its end; calls back with its messages and the error that ended it. */
function read(request, params, done) {
  const stream = new grpc.Stream(client, METHOD, params);
  const messages = [];
  let error = null;
  stream.on("data", (message) => messages.push(message));
  stream.on("error", (reason) => { error = reason; });
  stream.on("end", () => done(messages, error));
  stream.write(request);
  stream.end();
}

export function load() {
  client.connect(__ENV.ADDRESS, { plaintext: true, reflect: true });
  read({ model: "tiny", prompt, sampling: { max_new_tokens: 12, ignore_eos: true } }, {}, (messages, error) => {
    check(messages, {
      "a stream ends with its usage": (all) =>
        error === null && all[all.length - 1].finished.usage.completionTokens === 12,
    });
    client.close();
  });
  const body = JSON.stringify({ model: "tiny", messages: [{ role: "user", content: "hi" }], max_tokens: 12, stream: true });
  const answer = http.post(`http://${__ENV.HTTP}/v1/chat/completions`, body, { headers: { "Content-Type": "application/json" } });
  check(answer, { "events end with [DONE]": (got) => got.status === 200 && got.body.endsWith("data: [DONE]\n\n") });
}

export function edges() {
  client.connect(__ENV.ADDRESS, { plaintext: true, reflect: true });
  const unary = client.invoke("radixfleet.v1.Inference/GetModelInfo", { model: "none" });
  check(unary, { "an unknown model is not found": (got) => got.status === grpc.StatusNotFound });
  const began = Date.now();
  read({ model: "silent", prompt, sampling: { max_new_tokens: Number(__ENV.SILENCE_S) } }, {}, (messages, error) => {
    check(messages, {
      "a silent stream ends well": (all) => error === null && all[all.length - 1].finished !== undefined,
      "it was silent": () => Date.now() - began > Number(__ENV.SILENCE_S) * 1000 - 500,
    });
    read({ model: "silent", prompt, sampling: { max_new_tokens: 60 } }, { timeout: "500ms" }, (_all, late) => {
      check(late, { "a deadline ends a stream": (got) => got !== null });
      client.close();
    });
  });
}
