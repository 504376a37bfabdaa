// Files attached to a message. The browser reads their text, which is sent before the message, or their image.

import { byId, h, icon, ICONS } from "./dom.js";
import { imageKind, picture, urlOf } from "./images.js";
import { notice } from "./notices.js";
import { textOfPdf } from "./pdf.js";
import { count, counted, size } from "./units.js";

const MOST_BYTES = 1 << 20; // of a file: about the largest text whose tokens the server counts
const MOST_PDF_BYTES = 20 << 20;
const MOST_IMAGE_BYTES = 50 << 20;
const WHOLE = 2048; // pixels of an opened image
const MOST_FILES = 16;
const LONGEST_NAME = 120;

/** Read a file: {name, text} or {name, image}. sees: whether the model reads images. Throws an Error with a message for
 * the user. */
async function read(file, sees) {
  const name = file.name.replace(/[\p{C}`]+/gu, " ").slice(-LONGEST_NAME) || "file";
  const bytes = new Uint8Array(await file.arrayBuffer());
  const isPdf = startsWith(bytes, "%PDF-"), kind = sees ? imageKind(bytes) : null;
  const most = isPdf ? MOST_PDF_BYTES : kind ? MOST_IMAGE_BYTES : MOST_BYTES;
  const tooLarge = (n, limit) => new Error(`${name} has ${size(n)}, and the limit is ${size(limit)}: attach a part of it.`);
  if (bytes.length > most) throw tooLarge(bytes.length, most);
  if (kind) return { name, image: await urlOf(name, bytes, kind) };
  const text = isPdf ? await pdf(name, bytes) : decoded(bytes);
  if (text === null) throw new Error(`${name} is neither text in UTF-8 or UTF-16 nor a PDF: this model reads ${sees ? "text and images" : "text"} only.`);
  if (text.length > MOST_BYTES) throw tooLarge(text.length, MOST_BYTES);
  if (text.trim() === "") throw new Error(`${name} is empty.`);
  return { name, text };
}

async function pdf(name, bytes) {
  try {
    return await textOfPdf(bytes);
  } catch (error) {
    throw new Error(`${name} ${error.message}.`);
  }
}

const startsWith = (bytes, text) => [...text].every((letter, i) => bytes[i] === letter.charCodeAt(0));

/** Decode bytes as text; null if they are not text. */
function decoded(bytes) {
  const utf16 = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2).join()];
  try {
    const text = new TextDecoder(utf16 ?? "utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replace(/\r\n?/g, "\n");
  } catch {
    return null;
  }
}

/** Return a text between fences that do not occur in it. */
export function fenced(text, kind = "") {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${fence}${kind}\n${text.replace(/\n+$/, "")}\n${fence}`;
}

/** Return a message as the model reads it: images, each text file after its name, between unique fences, then the text.
 * With images it is a list of parts, otherwise a text. */
export function contentOf({ content, files = [] }) {
  const blocks = files.filter(({ image }) => image === undefined).map(({ name, text }) => {
    const kind = /\.(?!pdf$)(\w{1,10})$/i.exec(name)?.[1] ?? "";
    return `File ${name}:\n${fenced(text, kind.toLowerCase())}`;
  });
  const text = [...blocks, content].filter((part) => part !== "").join("\n\n");
  const images = files.filter(({ image }) => image !== undefined);
  if (images.length === 0) return text;
  const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text === "" ? parts : [...parts, { type: "text", text }];
}

/** Return the file list above a sent message. */
export function fileList(files) {
  return h(
    "ul",
    { class: "files" },
    files.map(({ name, text, image }) =>
      h("li", {}, image === undefined
        ? h("details", {}, h("summary", {}, name), h("pre", { tabIndex: 0, role: "region", "aria-label": name }, text))
        : imageDetails(name, image)),
    ),
  );
}

/** Return a thumbnail that opens the image. The large picture is drawn when it is first opened. */
function imageDetails(name, image) {
  const details = h("details", { class: "image" }, h("summary", { title: name }, picture(name, image)));
  details.addEventListener("toggle", () => details.append(picture(name, image, WHOLE)), { once: true });
  return details;
}

/** The files of the message that is being written. */
export class Attachments {
  /** countTokens(text): a promise of the number, null if unknown. room(): free tokens of the context, or null. sees():
   * whether the model reads images. */
  constructor({ countTokens, room, sees }) {
    this.countTokens = countTokens;
    this.room = room;
    this.sees = sees;
    this.files = [];
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", (event) => {
      const chosen = [...event.target.files];
      event.target.value = "";
      this.add(chosen);
    });
    byId("ask").addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
    const chat = byId("chat");
    chat.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      chat.classList.add("dropping");
    });
    chat.addEventListener("dragleave", (event) => {
      if (!chat.contains(event.relatedTarget)) chat.classList.remove("dropping");
    });
    chat.addEventListener("drop", (event) => {
      chat.classList.remove("dropping");
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(chosen) {
    for (const file of chosen) {
      if (this.files.length === MOST_FILES) {
        notice("files", `A message can have at most ${MOST_FILES} files.`);
        break;
      }
      try {
        const read_ = await read(file, this.sees());
        this.files.push(read_);
        this.draw();
        this.count(read_);
      } catch (error) {
        notice("files", error.message);
      }
    }
    byId("ask").focus();
  }

  async count(file) {
    if (file.image !== undefined) return; // only the model's encoder knows
    try {
      file.tokens = await this.countTokens(contentOf({ content: "", files: [file] }));
    } catch {
      file.tokens = null; // unknown; the request will report an error
    }
    this.draw();
  }

  /** Remove and return the files, for a message that is sent now. */
  take() {
    const files = this.files.map(({ name, text, image }) => (image === undefined ? { name, text } : { name, image }));
    this.files = [];
    this.draw();
    return files;
  }

  draw() {
    const sum = this.files.reduce((all, file) => all + (file.tokens ?? 0), 0), room = this.room();
    byId("files").hidden = this.files.length === 0;
    byId("files").replaceChildren(
      ...this.files.map((file, i) => {
        const remove = h("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}` }, icon(ICONS.close));
        remove.addEventListener("click", () => {
          this.files.splice(i, 1);
          this.draw();
          byId("ask").focus();
        });
        const length = file.tokens ? counted(file.tokens, "token") : size(new Blob([file.text ?? atob(file.image.split(",")[1])]).size);
        const shown = file.image === undefined ? h("span", {}, file.name) : picture(file.name, file.image, 48);
        return h("li", {}, shown, h("small", {}, length), remove);
      }),
    );
    if (room !== null && sum >= room) {
      byId("files").append(h("li", { class: "problem" }, `There is no room for ${counted(sum, "token")}: the context has ${count(room)}.`));
    }
  }
}
