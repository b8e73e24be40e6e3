// Tables of requests, the bar of their phases, and the dialog with one timeline.

import { getJson } from "./api.js";
import { byId, el, ms, PHASES, quantile } from "./format.js";

export function phaseBar(phases) {
  const total = Object.values(phases).reduce((sum, value) => sum + value, 0) || 1;
  const bar = el("div", { class: "phases" });
  const words = [];
  for (const name of PHASES) {
    if (!phases[name]) continue;
    const title = `${name.replace("_", " ")} ${ms(phases[name])}`;
    words.push(title);
    bar.append(el("i", { "data-p": name, title, style: `flex:${phases[name] / total}` }));
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", words.join(", "));
  return bar;
}

const COLUMNS = [
  ["request", "id"], ["state", ""], ["age", "num"], ["e2e", "num"], ["TTFT", "num opt"],
  ["TPOT", "num opt"], ["prompt", "num opt"], ["cached", "num opt"], ["out", "num"],
  ["preempted", "num opt"], ["where its time went", "bars"],
];

function row(request) {
  const state = request.finish ?? request.state;
  const cells = [
    request.id, el("span", { class: "chip", "data-p": request.finish ? null : state }, state.replace("_", " ")),
    ms(request.age_ms), ms(request.e2e_ms), ms(request.ttft_ms), ms(request.tpot_ms),
    request.prompt_tokens, request.cached_tokens, request.completion_tokens, request.preemptions || "",
    phaseBar(request.phases_ms),
  ];
  const line = el("tr", { tabindex: "0", "data-id": request.answer_id });
  cells.forEach((cell, index) => {
    const attributes = { class: COLUMNS[index][1] };
    if (index === 0) attributes.title = request.id;
    line.append(el("td", attributes, cell));
  });
  return line;
}

// `done`: the end to end time of finished requests; else the age of those that go on.
export function fillTable(table, requests, words, done) {
  const hidden = done ? 2 : 3;
  const kept = document.activeElement?.dataset?.id;
  const head = el("tr");
  COLUMNS.forEach(([name, kind], index) => {
    if (index !== hidden) head.append(el("th", { class: kind, scope: "col" }, name));
  });
  const body = el("tbody");
  for (const request of requests) {
    const line = row(request);
    line.children[hidden].remove();
    body.append(line);
  }
  if (!requests.length) body.append(el("tr", {}, el("td", { class: "empty", colspan: "10" }, words)));
  table.replaceChildren(el("thead", {}, head), body);
  if (kept) table.querySelector(`tr[data-id="${CSS.escape(kept)}"]`)?.focus({ preventScroll: true });
}

export function openOnChoice(table) {
  const open = (event) => {
    const id = event.target.closest("tr[data-id]")?.dataset.id;
    if (!id) return;
    event.preventDefault(); // or the same Enter closes the dialog again
    showTimeline(id);
  };
  table.addEventListener("click", open);
  table.addEventListener("keydown", (event) => event.key === "Enter" && open(event));
}

export function waterfall(node, phases, total) {
  node.replaceChildren();
  for (const { phase, start_ms: start, duration_ms: duration } of phases) {
    const left = (100 * start) / total;
    const width = (100 * duration) / total;
    node.append(
      el("span", {}, phase.replace("_", " ")),
      el("div", { class: "lane", "data-p": phase },
        el("i", { style: `left:${Math.min(left, 99.5)}%;width:${width}%` })),
      el("span", { class: "ms" }, ms(duration)),
    );
  }
}

async function showTimeline(id) {
  const body = byId("detail-body");
  byId("detail-title").textContent = id;
  body.replaceChildren(el("p", { class: "faint" }, "Reading…"));
  byId("detail").showModal();
  try {
    const found = await getJson(`/admin/requests/${encodeURIComponent(id)}/timeline`);
    byId("detail-title").textContent = found.id;
    const bars = el("div", { class: "waterfall" });
    waterfall(bars, found.phases.slice(0, 40), found.e2e_ms || 1);
    const chunks = found.sequences.flatMap((sequence) => sequence.stays.flatMap((stay) => stay.chunks));
    const middle = quantile(found.steps.map((step) => step.duration_ms), 0.5);
    body.replaceChildren(
      el("p", { class: "faint" },
        `${found.prompt_tokens} prompt tokens, ${found.cached_tokens} of them cached; ` +
        `${found.completion_tokens} generated; ${found.preemptions} preemptions; ` +
        `end to end ${ms(found.e2e_ms)}, ${found.finish ?? found.state}.`),
      bars,
      el("p", { class: "faint" },
        `${found.num_steps} steps, ${ms(middle)} each (median); prompt computed in ${chunks.length} ${chunks.length === 1 ? "chunk" : "chunks"}: ` +
        chunks.slice(0, 12).map((chunk) => `${chunk.length} in step ${chunk.step}`).join(", ") +
        (chunks.length > 12 ? ", …" : "") + "."),
    );
  } catch (error) {
    body.replaceChildren(el("p", { class: "error" }, error.message));
  }
}
