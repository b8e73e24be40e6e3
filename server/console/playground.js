// Chats with the server as any client would, and shows when each token came.

import { key, stream } from "./api.js";
import { available, GapChart } from "./charts.js";
import { byId, el, ms, quantile, setText } from "./format.js";
import { waterfall } from "./tables.js";

const PATH = "/v1/chat/completions";
const PARTS = ["parse", "tokenize", "queue", "prefill", "first_sample", "write"];

export class Playground {
  constructor(live) {
    this.live = live;
    this.messages = [];
    this.abort = null;
    this.language = "curl";
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("copy").addEventListener("click", () => this.copy());
    for (const language of ["curl", "python"]) {
      byId(`code-${language}`).addEventListener("click", () => this.show(language));
    }
    for (const id of ["max-tokens", "temperature"]) byId(id).addEventListener("input", () => this.show());
    this.body = this.makeBody([{ role: "user", content: "Hello!" }]);
    this.show();
  }

  makeCharts() {
    if (available()) this.gaps = new GapChart("chart-gaps");
  }

  makeBody(messages) {
    return {
      messages,
      max_tokens: Number(byId("max-tokens").value) || 128,
      temperature: Number(byId("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
      timings: true,
    };
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    byId("messages").replaceChildren();
    byId("prompt").focus();
  }

  async send() {
    const text = byId("prompt").value.trim();
    if (!text || this.abort) return;
    byId("prompt").value = "";
    this.messages.push({ role: "user", content: text });
    this.body = this.makeBody([...this.messages]);
    this.show();
    const answer = this.add("user", text) && this.add("assistant", "");
    this.abort = new AbortController();
    byId("stop").disabled = false;
    byId("send").disabled = true;
    const run = { sent: performance.now(), last: 0, gaps: [], text: "", first: 0 };
    try {
      await stream(PATH, { body: this.body, signal: this.abort.signal }, (event, now) =>
        this.take(event, now, run, answer));
    } catch (error) {
      if (error.name !== "AbortError") answer.append(el("span", { class: "error" }, ` ${error.message}`));
    }
    this.messages.push({ role: "assistant", content: run.text });
    this.abort = null;
    byId("stop").disabled = true;
    byId("send").disabled = false;
  }

  add(role, text) {
    const node = el("div", { class: role }, text);
    byId("messages").append(node);
    byId("messages").scrollTop = byId("messages").scrollHeight;
    return node;
  }

  take(event, now, run, answer) {
    if (event.error) throw new Error(event.error.message);
    const text = event.choices?.[0]?.delta?.content;
    if (text) {
      const gap = now - (run.last || run.sent);
      if (!run.first) run.first = now;
      else run.gaps.push(gap);
      run.last = now;
      run.text += text;
      const title = run.first === now ? `first text after ${ms(gap)}` : `+${ms(gap)}`;
      answer.append(el("span", { title, "data-ms": gap.toFixed(2) }, text));
      byId("messages").scrollTop = byId("messages").scrollHeight;
      this.gaps?.show(run.gaps, this.live.limits.tpot);
      setText("gap-stats", `p50 ${ms(quantile(run.gaps, 0.5))}, p99 ${ms(quantile(run.gaps, 0.99))}`);
    }
    if (event.timings) this.showParts(event.timings, run);
    if (event.usage) {
      const { prompt_tokens: prompt, completion_tokens: made } = event.usage;
      const cached = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
      setText("play-stats", `${prompt} prompt tokens (${cached} cached), ${made} generated`);
    }
  }

  // The server's parts, and what is left of the time that this page waited: network and browser.
  showParts(timings, run) {
    const phases = [];
    let start = 0;
    for (const part of PARTS) {
      const duration = timings[`${part}_ms`];
      phases.push({ phase: part, start_ms: start, duration_ms: duration });
      start += duration;
    }
    const seen = run.first - run.sent;
    phases.push({ phase: "close", start_ms: start, duration_ms: Math.max(seen - start, 0) });
    waterfall(byId("waterfall"), phases, Math.max(seen, start));
    byId("waterfall").children[phases.length * 3 - 3].textContent = "network, browser";
    setText("ttft-total", `server ${ms(timings.ttft_ms)}, seen here ${ms(seen)}`);
  }

  // --- the same again ---------------------------------------------------------------------------

  show(language = this.language) {
    this.language = language;
    for (const name of ["curl", "python"]) {
      byId(`code-${name}`).setAttribute("aria-selected", `${name === language}`);
    }
    const body = { ...this.body, max_tokens: this.makeBody([]).max_tokens, temperature: this.makeBody([]).temperature };
    byId("code").textContent = language === "curl" ? asCurl(body) : asPython(body);
  }

  async copy() {
    const button = byId("copy");
    try {
      await navigator.clipboard.writeText(byId("code").textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(byId("code"));
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
}

function asCurl(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const header = key.get() ? " \\\n  -H \"Authorization: Bearer $PACELINE_API_KEY\"" : "";
  return `curl -N ${location.origin}${PATH} \\\n  -H 'Content-Type: application/json'${header} \\\n  -d '${json}'`;
}

function asPython(body) {
  const { timings, ...known } = body;
  const lines = Object.entries(known).map(([name, value]) => `    ${name}=${python(value)},`);
  const secret = key.get() ? 'os.environ["PACELINE_API_KEY"]' : '"none"';
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${secret})
stream = client.chat.completions.create(
    model=${python(byId("model").textContent || "default")},
${lines.join("\n")}
    extra_body={"timings": ${python(timings)}},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)`;
}

// JSON is nearly Python: only the three words differ.
function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${python(part)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
