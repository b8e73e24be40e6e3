// The clients from npm against the server at PACELINE_URL: openai and the Vercel AI SDK.
// Each check is one function; the last line says how many held.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, streamText, tool } from "ai";

const url = process.env.PACELINE_URL;
const apiKey = "sk-conformance";
const model = "scripted";
const hello = "Hello there, čau \u{1F600}!";
const client = new OpenAI({ baseURL: url + "/v1", apiKey, maxRetries: 0 });
const provider = createOpenAICompatible({
  name: "paceline",
  baseURL: url + "/v1",
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const user = (content) => [{ role: "user", content }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const weather = {
  type: "function",
  function: { name: "get_weather", description: "The weather of a city.", parameters },
};
const place = jsonSchema({
  type: "object",
  properties: { city: { type: "string" }, country: { type: "string" } },
  required: ["city", "country"],
  additionalProperties: false,
});

async function textOf(stream) {
  let text = "";
  for await (const part of stream) text += part;
  return text;
}

const checks = {
  async "openai: chat"() {
    const made = await client.chat.completions.create({ model, messages: user("hello") });
    assert.equal(made.choices[0].message.content, hello);
    assert.equal(made.choices[0].finish_reason, "stop");
    assert.ok(made._request_id);
  },
  async "openai: stream and its helper"() {
    const stream = await client.chat.completions.create({
      model,
      messages: user("hello"),
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, hello);
    assert.ok(usage.total_tokens > 0);
    const final = await client.chat.completions
      .stream({ model, messages: user("hello") })
      .finalChatCompletion();
    assert.equal(final.choices[0].message.content, hello);
  },
  async "openai: tools, plain and streamed"() {
    const made = await client.chat.completions.create({
      model,
      messages: user("weather?"),
      tools: [weather],
    });
    assert.deepEqual(JSON.parse(made.choices[0].message.tool_calls[0].function.arguments), {
      city: "Paris",
    });
    const final = await client.chat.completions
      .stream({ model, messages: user("weather?"), tools: [weather] })
      .finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
    assert.equal(final.choices[0].finish_reason, "tool_calls");
  },
  async "openai: completions"() {
    const made = await client.completions.create({ model, prompt: "count", max_tokens: 60 });
    assert.equal(made.choices[0].text, "1 2 3 4 5 6 7 8 9");
  },
  async "openai: responses"() {
    const first = await client.responses.create({ model, input: "hello" });
    assert.equal(first.output_text, hello);
    const final = await client.responses
      .stream({ model, input: "count", previous_response_id: first.id })
      .finalResponse();
    assert.equal(final.output_text, "1 2 3 4 5 6 7 8 9");
    assert.equal((await client.responses.retrieve(first.id)).id, first.id);
    await client.responses.delete(first.id);
    await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
  },
  async "openai: embeddings"() {
    const made = await client.embeddings.create({ model, input: ["a", "b"] });
    assert.equal(made.data[1].embedding.length, 16);
  },
  async "openai: errors"() {
    const asked = { model, messages: user("hello"), temperature: 9 };
    await assert.rejects(client.chat.completions.create(asked), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  },
  async "ai-sdk: generateText"() {
    const made = await generateText({ model: provider(model), prompt: "hello" });
    assert.equal(made.text, hello);
    assert.equal(made.finishReason, "stop");
    assert.ok(made.usage.totalTokens > 0);
  },
  async "ai-sdk: streamText"() {
    const made = streamText({ model: provider(model), prompt: "hello" });
    assert.equal(await textOf(made.textStream), hello);
    assert.ok((await made.usage).totalTokens > 0);
  },
  async "ai-sdk: tools"() {
    const tools = {
      get_weather: tool({
        description: "The weather of a city.",
        inputSchema: jsonSchema(parameters),
      }),
    };
    const made = await generateText({ model: provider(model), prompt: "weather?", tools });
    assert.deepEqual(made.toolCalls[0].input, { city: "Paris" });
    const streamed = streamText({ model: provider(model), prompt: "weather?", tools });
    for await (const part of streamed.fullStream) assert.notEqual(part.type, "error");
    assert.deepEqual((await streamed.toolCalls)[0].input, { city: "Paris" });
  },
  async "ai-sdk: structured output"() {
    const made = await generateText({
      model: provider(model),
      prompt: "as json",
      output: Output.object({ schema: place }),
    });
    assert.deepEqual(made.output, { city: "Paris", country: "France" });
  },
  async "ai-sdk: completions and embeddings"() {
    const made = await generateText({ model: provider.completionModel(model), prompt: "count" });
    assert.match(made.text, /^1 2/);
    const embedded = await embedMany({
      model: (provider.embeddingModel ?? provider.textEmbeddingModel)(model),
      values: ["a", "b"],
    });
    assert.equal(embedded.embeddings[0].length, 16);
  },
  async "ai-sdk: errors"() {
    const asked = { model: provider("other"), prompt: "hello", maxRetries: 0 };
    await assert.rejects(generateText(asked), (error) => {
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /does not exist/);
      return true;
    });
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
  } catch (error) {
    failed += 1;
    console.error(`FAILED ${name}\n${error?.stack ?? error}`);
  }
}
const total = Object.keys(checks).length;
console.log(`node clients: ${total - failed} of ${total} checks held`);
process.exit(failed ? 1 : 0);
