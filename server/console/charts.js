// Charts by Bokeh (https://bokeh.org), which the server serves from its Python package.
// Each chart owns a figure and a source; the page gives it plain columns. Without Bokeh: no charts.

import { byId, color } from "./format.js";

export const available = () => typeof globalThis.Bokeh?.Plotting?.figure === "function";
const painted = new Set();

function makeFigure(id, options) {
  const figure = Bokeh.Plotting.figure({
    sizing_mode: "stretch_both",
    tools: "",
    toolbar_location: null,
    outline_line_color: null,
    min_border_left: 56,
    min_border_right: 6,
    min_border_top: 4,
    ...options,
  });
  figure.xgrid.visible = false;
  Bokeh.Plotting.show(figure, byId(id));
  return figure;
}

// The colours of the page; `extra` repaints what the chart itself draws.
function paint(figure, extra) {
  const set = () => {
    for (const axis of [figure.xaxis, figure.yaxis]) {
      axis.axis_line_color = color("line");
      axis.major_tick_line_color = color("line");
      axis.minor_tick_line_color = null;
      axis.major_label_text_color = color("faint");
      axis.major_label_text_font_size = "11px";
      axis.axis_label_text_color = color("faint");
      axis.axis_label_text_font_size = "11px";
      axis.axis_label_text_font_style = "normal";
      axis.axis_label_standoff = 4;
    }
    figure.ygrid.grid_line_color = color("line");
    figure.background_fill_color = color("card");
    figure.border_fill_color = color("card");
    extra();
  };
  set();
  painted.add(set);
}

export function repaint() {
  for (const set of painted) set();
}

const limitLine = (dimension) =>
  new Bokeh.Span({ dimension, location: null, line_dash: [6, 4], line_width: 1.5 });

// Tokens and duration of each step against time, newest at the right.
export class StepCharts {
  constructor(tokensId, timeId, seconds) {
    this.seconds = seconds;
    this.place = byId(tokensId);
    // A model belongs to one figure only, so each has its own range and source.
    const across = () => new Bokeh.Range1d({ start: -seconds, end: 0 });
    const tokensOf = { left: [], right: [], decode: [], total: [] };
    this.tokens = new Bokeh.ColumnDataSource({ data: tokensOf });
    this.tokensTop = new Bokeh.Range1d({ start: 0, end: 10 });
    const tokens = makeFigure(tokensId, { x_range: across(), y_range: this.tokensTop });
    const side = { left: { field: "left" }, right: { field: "right" }, line_color: null };
    const stack = { ...side, source: this.tokens };
    const decode = tokens.quad({ ...stack, bottom: 0, top: { field: "decode" } });
    const prefill = tokens.quad({ ...stack, bottom: { field: "decode" }, top: { field: "total" } });
    tokens.yaxis.axis_label = "tokens";
    tokens.xaxis.visible = false;
    this.times = new Bokeh.ColumnDataSource({ data: { left: [], right: [], ms: [] } });
    this.timeTop = new Bokeh.Range1d({ start: 0, end: 10 });
    const time = makeFigure(timeId, { x_range: across(), y_range: this.timeTop });
    const bars = time.quad({ ...side, source: this.times, bottom: 0, top: { field: "ms" } });
    time.yaxis.axis_label = "ms";
    time.xaxis.axis_label = "seconds ago";
    time.xaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0" });
    this.limit = limitLine("width");
    time.add_layout(this.limit);
    paint(tokens, () => {
      decode.glyph.fill_color = color("decode");
      prefill.glyph.fill_color = color("prefill");
    });
    paint(time, () => {
      bars.glyph.fill_color = color("decode");
      this.limit.line_color = color("target");
    });
  }

  // `steps` are [ended, duration, prefill, decode] in ms and tokens; `now` in ms.
  show(steps, now, limit) {
    const data = { left: [], right: [], decode: [], total: [], ms: [] };
    const { left, right, ms } = data;
    let mostTokens = 8;
    let longest = 1;
    // Less than a pixel of a step would be a haze.
    const pixel = this.seconds / Math.max(this.place.clientWidth - 70, 100);
    for (const [ended, duration, prefill, decode] of steps) {
      const end = (ended - now) / 1000;
      left.push(end - Math.max(duration / 1000, pixel));
      right.push(end);
      data.decode.push(decode);
      data.total.push(decode + prefill);
      ms.push(duration);
      mostTokens = Math.max(mostTokens, decode + prefill);
      longest = Math.max(longest, duration);
    }
    this.tokens.data = { left, right, decode: data.decode, total: data.total };
    this.times.data = { left, right, ms };
    this.tokensTop.end = mostTokens * 1.08;
    const shown = Math.max(longest, limit < longest * 8 ? limit : 0);
    this.timeTop.end = shown * 1.12;
    this.limit.location = limit;
  }
}

// A histogram of latencies in ms over logarithmic bins, with the limit.
export class Histogram {
  constructor(id, low, high, name) {
    this.edges = [];
    for (let edge = low; edge <= high * 1.0001; edge *= 10 ** (1 / 8)) this.edges.push(edge);
    this.top = new Bokeh.Range1d({ start: 0, end: 5 });
    this.source = new Bokeh.ColumnDataSource({ data: { left: [], right: [], top: [] } });
    const figure = makeFigure(id, {
      x_axis_type: "log",
      x_range: new Bokeh.Range1d({ start: low, end: high }),
      y_range: this.top,
    });
    const bars = figure.quad({
      left: { field: "left" }, right: { field: "right" }, top: { field: "top" }, bottom: 0,
      source: this.source,
    });
    figure.xaxis.axis_label = "ms";
    figure.xaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0.[0]a" });
    figure.yaxis.axis_label = "requests";
    this.limit = limitLine("height");
    figure.add_layout(this.limit);
    paint(figure, () => {
      bars.glyph.fill_color = color(name);
      bars.glyph.line_color = color("card");
      this.limit.line_color = color("target");
    });
  }

  show(values, limit) {
    const edges = this.edges;
    const counts = new Array(edges.length - 1).fill(0);
    for (const value of values) {
      let bin = Math.floor(Math.log10(value / edges[0]) * 8);
      bin = Math.min(Math.max(bin, 0), counts.length - 1);
      counts[bin] += 1;
    }
    this.source.data = { left: edges.slice(0, -1), right: edges.slice(1), top: counts };
    this.top.end = Math.max(5, ...counts) * 1.1;
    this.limit.location = limit;
  }
}

// The pause before each piece of text of one answer.
export class GapChart {
  constructor(id) {
    this.across = new Bokeh.Range1d({ start: 0, end: 20 });
    this.top = new Bokeh.Range1d({ start: 0, end: 10 });
    this.source = new Bokeh.ColumnDataSource({ data: { left: [], right: [], top: [] } });
    const figure = makeFigure(id, { x_range: this.across, y_range: this.top });
    const bars = figure.quad({
      left: { field: "left" }, right: { field: "right" }, top: { field: "top" }, bottom: 0,
      source: this.source, line_color: null,
    });
    figure.xaxis.axis_label = "token";
    figure.yaxis.axis_label = "ms";
    this.limit = limitLine("width");
    figure.add_layout(this.limit);
    paint(figure, () => {
      bars.glyph.fill_color = color("decode");
      this.limit.line_color = color("target");
    });
  }

  show(gaps, limit) {
    this.source.data = {
      left: gaps.map((_, index) => index + 1.1),
      right: gaps.map((_, index) => index + 1.9),
      top: gaps,
    };
    this.across.end = Math.max(20, gaps.length + 2);
    const longest = Math.max(1, ...gaps);
    this.top.end = Math.max(longest, limit < longest * 8 ? limit : 0) * 1.12;
    this.limit.location = limit;
  }
}
