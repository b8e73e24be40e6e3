// Numbers and small pieces of the page.

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 10000 ? `${(value / 1000).toFixed(1)} k` : `${Math.round(value)}`;
}

export function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== `${text}`) node.textContent = text;
}

export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const PHASES = [
  "parse", "tokenize", "queue", "prefill", "first_sample", "write", "decode", "preempted",
  "recompute", "close",
];
