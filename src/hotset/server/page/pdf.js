// Extracts the text of a PDF with PDF.js, which is loaded for the first one. It runs in the page's own thread, because
// the content security policy allows no workers. Only text is read: nothing is drawn, and no script of a file runs.

const MOST_PAGES = 1000;

let library = null;

async function load() {
  await import("./vendor/pdf.worker.min.mjs"); // PDF.js finds it and starts no worker
  return import("./vendor/pdf.min.mjs");
}

/** Return the text of all pages. Throws an Error whose message continues the file's name: "is protected by a
 * password". */
export async function textOfPdf(bytes) {
  library ??= await load();
  library.setVerbosityLevel?.(library.VerbosityLevel.ERRORS);
  const task = library.getDocument({
    data: bytes, isEvalSupported: false, disableFontFace: true, useWorkerFetch: false, useWasm: false, enableXfa: false,
    verbosity: library.VerbosityLevel.ERRORS,
  });
  try {
    const pdf = await task.promise;
    if (pdf.numPages > MOST_PAGES) throw new Error(`has ${pdf.numPages} pages, and the limit is ${MOST_PAGES}`);
    const pages = [];
    for (let i = 1; i <= pdf.numPages; i++) {
      const { items } = await (await pdf.getPage(i)).getTextContent();
      pages.push(items.map((item) => (item.str ?? "") + (item.hasEOL ? "\n" : "")).join(""));
    }
    const text = pages.join("\n\n").trim();
    if (text === "") throw new Error("has no text: its pages may be images");
    return text;
  } catch (error) {
    if (error.name === "PasswordException") throw new Error("is protected by a password");
    if (error.constructor === Error && /^has /.test(error.message)) throw error;
    throw new Error("cannot be read as a PDF");
  } finally {
    await task.destroy();
  }
}
