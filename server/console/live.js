// The live view: one feed, a few times a second, into tiles, charts, the map and the tables.

import { stream } from "./api.js";
import { available, Histogram, StepCharts } from "./charts.js";
import { byId, count, ms, quantile, setText } from "./format.js";
import { KVMap } from "./kvmap.js";
import { fillTable, openOnChoice } from "./tables.js";

const SECONDS = 20;
const KEPT_LATENCIES = 1024;
const KEPT_FINISHED = 60;

export class Live {
  constructor() {
    this.steps = [];
    this.latencies = [];
    this.finished = [];
    this.limits = { ttft: 1000, tpot: 100 };
    this.map = new KVMap(byId("kv"));
    this.charts = null;
    for (const id of ["table-live", "table-done"]) openOnChoice(byId(id));
    fillTable(byId("table-live"), [], "Nothing runs and nothing waits.");
    fillTable(byId("table-done"), [], "No request has finished yet.", true);
  }

  makeCharts() {
    byId("nocharts").hidden = available();
    if (!available()) {
      for (const chart of document.querySelectorAll(".chart")) chart.hidden = true;
      return;
    }
    this.charts = {
      steps: new StepCharts("chart-tokens", "chart-time", SECONDS),
      ttft: new Histogram("chart-ttft", 1, 100000, "prefill"),
      tpot: new Histogram("chart-tpot", 0.1, 10000, "decode"),
    };
  }

  // Until the signal aborts; throws what the server or the network says.
  async follow(signal) {
    await stream("/admin/live?map=1", { signal }, (tick) => this.take(tick));
  }

  take(tick) {
    this.limits = { ttft: tick.ttft_limit_ms, tpot: tick.tpot_limit_ms };
    this.steps.push(...tick.steps);
    const oldest = tick.now_ms - SECONDS * 1000;
    this.steps = this.steps.filter((step) => step[1] > oldest);
    this.latencies = [...this.latencies, ...tick.latencies].slice(-KEPT_LATENCIES);
    this.finished = [...tick.finished.reverse(), ...this.finished].slice(0, KEPT_FINISHED);
    this.state(tick);
    this.tiles(tick);
    if (tick.kv) this.map.show(tick.kv);
    if (!byId("live").hidden) this.draw(tick);
    if (tick.finished.length) fillTable(byId("table-done"), this.finished, "", true);
  }

  state(tick) {
    byId("state").dataset.state = tick.state;
    setText("state", tick.state);
    setText("model", tick.model);
    setText("device", tick.device);
  }

  tiles(tick) {
    const recent = this.steps.filter((step) => step[1] > tick.now_ms - 2000);
    const last = tick.steps.at(-1);
    const sum = (column) => recent.reduce((total, step) => total + step[column], 0) / 2;
    if (last) {
      [, , , , , , this.running, this.waiting, this.used] = last;
    }
    const used = tick.unfinished || tick.steps.length ? (this.used ?? 0) : 0;
    const held = tick.kv ? Number(this.map.canvas.dataset.used) : used;
    const running = tick.unfinished ? (this.running ?? 0) : 0;
    setText("n-running", running);
    setText("n-slots", `of ${tick.max_running} slots`);
    setText("n-waiting", Math.max(tick.unfinished - running, 0));
    setText("n-kv", `${((100 * held) / Math.max(tick.num_blocks, 1)).toFixed(0)} %`);
    setText("n-blocks", `of ${count(tick.num_blocks)} blocks`);
    setText("kv-size", `${count(tick.num_blocks)} blocks of ${tick.block_size} tokens`);
    setText("n-decode", count(sum(5)));
    setText("n-prefill", count(sum(4)));
    setText("n-step", ms(quantile(recent.map((step) => step[2]), 0.5)));
    setText("n-target", `target ${ms(this.limits.tpot)}`);
    for (const [index, name] of ["ttft", "tpot"].entries()) {
      const values = this.latencies.map((entry) => entry[index]).filter((value) => value !== null);
      setText(`n-${name}`, ms(values.length ? quantile(values, 0.5) * 1000 : null));
      setText(`n-${name}99`, `p99 ${ms(values.length ? quantile(values, 0.99) * 1000 : null)}`);
    }
    setText("n-open", `${tick.num_requests} open, ${count(tick.unfinished)} sequences`);
    setText("n-seen", this.latencies.length);
  }

  draw(tick) {
    fillTable(byId("table-live"), tick.requests, "Nothing runs and nothing waits.");
    if (!this.charts) return;
    const shown = this.steps.map((step) => [step[1], step[2], step[4], step[5]]);
    this.charts.steps.show(shown, tick.now_ms, this.limits.tpot);
    byId("chart-tokens").dataset.newest = this.steps.at(-1)?.[0] ?? 0;
    if (tick.latencies.length || !this.drawn) {
      const values = (index) =>
        this.latencies.map((entry) => entry[index] * 1000).filter((value) => value > 0);
      this.charts.ttft.show(values(0), this.limits.ttft);
      this.charts.tpot.show(values(1), this.limits.tpot);
      this.drawn = true;
    }
  }
}
