// The KV pool as a grid of blocks: who holds each, what is cached, what is free.

import { byId, color, count, setText } from "./format.js";

const CACHED = 1;
const SHARED = 2;
const FIRST_OWNER = 3;

// One hue a sequence, the same as long as it lives.
function hue(owner) {
  let hash = 7;
  for (const char of owner) hash = (hash * 31 + char.codePointAt(0)) >>> 0;
  return (hash * 137.508) % 360;
}

export class KVMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.cells = new Uint16Array(0);
    this.owners = [];
    canvas.addEventListener("pointermove", (event) => this.tell(event));
    canvas.addEventListener("pointerdown", (event) => this.tell(event));
    canvas.addEventListener("pointerleave", () => setText("kv-hint", this.hint));
    this.hint = byId("kv-hint").textContent;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(map) {
    const bytes = Uint8Array.from(atob(map.cells), (char) => char.charCodeAt(0));
    this.cells = new Uint16Array(bytes.buffer);
    this.owners = map.owners;
    this.stride = map.stride;
    this.draw();
    const totals = [0, 0, 0, 0];
    for (const cell of this.cells) totals[Math.min(cell, FIRST_OWNER)] += this.stride;
    const [free, cached, shared, own] = totals;
    setText("kv-free", count(free));
    setText("kv-cached", count(cached));
    setText("kv-shared", count(shared));
    this.canvas.dataset.used = own + shared;
    this.canvas.dataset.cached = cached;
    this.canvas.setAttribute(
      "aria-label",
      `KV blocks: ${own + shared} held by ${this.owners.length} sequences, ${cached} cached, ${free} free`,
    );
  }

  layout() {
    const width = this.canvas.clientWidth;
    const height = width > 480 ? 310 : 220;
    let size = Math.floor(Math.sqrt((width * height) / Math.max(this.cells.length, 1)));
    size = Math.min(Math.max(size, 3), 26);
    while (size > 3 && Math.ceil(this.cells.length / Math.floor(width / size)) * size > height) size -= 1;
    return { width, size, columns: Math.max(1, Math.floor(width / size)) };
  }

  draw() {
    const { width, size, columns } = this.layout();
    const ratio = globalThis.devicePixelRatio || 1;
    const height = Math.max(1, Math.ceil(this.cells.length / columns)) * size;
    this.canvas.style.height = `${height}px`;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const dark = document.documentElement.dataset.theme === "dark";
    const fills = this.owners.map((owner) => `hsl(${hue(owner)} 72% ${dark ? 62 : 50}%)`);
    const plain = [color("free"), color("cached"), color("shared")];
    const gap = size > 5 ? 1.5 : 0.5;
    this.cells.forEach((cell, index) => {
      context.fillStyle = cell < FIRST_OWNER ? plain[cell] : fills[cell - FIRST_OWNER];
      context.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - gap, size - gap);
    });
  }

  tell(event) {
    const { size, columns } = this.layout();
    const index = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    const cell = this.cells[index];
    if (cell === undefined) return;
    const what =
      cell === CACHED ? "cached, free to take"
      : cell === SHARED ? "shared by several sequences"
      : cell === 0 ? "free"
      : `held by ${this.owners[cell - FIRST_OWNER]}`;
    setText("kv-hint", `Block ${index * this.stride}: ${what}`);
  }
}
