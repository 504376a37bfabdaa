// Images of a message: read from a file, made small enough to send, and drawn. They are drawn on canvases, because the
// page's Content-Security-Policy allows only images of the server.

import { h } from "./dom.js";

const MOST_BYTES = 300 << 10; // of an image that is sent unchanged: the browser stores few megabytes of conversations
const LONGEST_SIDE = 1536; // pixels of a larger one
const THUMBNAIL = 160; // pixels of its longest side
const URL_FORM = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/;

/** Return the MIME type of an image's bytes, or null. */
export function imageKind(bytes) {
  const begins = (text, at = 0) => [...text].every((letter, i) => bytes[at + i] === letter.charCodeAt(0));
  if (begins("\x89PNG\r\n\x1a\n")) return "image/png";
  if (begins("\xff\xd8\xff")) return "image/jpeg";
  if (begins("GIF8")) return "image/gif";
  return begins("RIFF") && begins("WEBP", 8) ? "image/webp" : null;
}

export const isImageUrl = (text) => typeof text === "string" && URL_FORM.test(text);

/** Return an image as a data URL. Throws an Error with a message for the user. */
export async function urlOf(name, bytes, kind) {
  const blob = new Blob([bytes], { type: kind });
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Error(`${name} cannot be read as an image.`);
  }
  if (bytes.length <= MOST_BYTES) return read(blob);
  const canvas = drawn(bitmap, LONGEST_SIDE);
  return read(await new Promise((made) => canvas.toBlob(made, "image/jpeg", 0.9)));
}

function read(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error("The image cannot be read."));
    reader.readAsDataURL(blob);
  });
}

function drawn(bitmap, longest, canvas = h("canvas")) {
  const scale = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff"; // a JPEG has no transparency
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** Return an element that shows an image. longest: pixels of its longer side. */
export function picture(name, url, longest = THUMBNAIL) {
  const canvas = h("canvas", { role: "img", "aria-label": name, width: 1, height: 1 });
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (letter) => letter.charCodeAt(0));
  createImageBitmap(new Blob([bytes])).then((bitmap) => drawn(bitmap, longest, canvas), () => canvas.replaceWith(h("span", {}, name)));
  return canvas;
}
