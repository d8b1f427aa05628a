# SPDX-License-Identifier: Apache-2.0
"""Draw how kernels split their work: docs/kernels_attention.svg, kernels_attention_sm90.svg and kernels_sampling.svg.

python scripts/draw_kernels.py            check that the pictures are current
python scripts/draw_kernels.py --write    write them
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent.parent / "docs"
COLOURS = ("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fbb4b9", "#d9d9d9")
GREY, DARK = "#f2f2f2", "#333333"


class Picture:
    """Boxes, texts and arrows of an SVG file."""

    def __init__(self, width: int, height: int) -> None:
        font = 'font-family="sans-serif" font-size="12"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {font}>',
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{DARK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> None:
        style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{DARK}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: str = GREY, words: str = "") -> None:
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {where} fill="{colour}" stroke="{DARK}" stroke-width="0.7"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 4, words, "middle")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        line = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.parts.append(f'<line {line} stroke="{DARK}" marker-end="url(#tip)"/>')

    def finish(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def draw_decode_list(p: Picture) -> None:
    """Draw four requests, whose keys are cut into six equal ranges, one per block."""
    p.text(20, 24, "Decode list: keys of the whole batch in ranges of equal length, one per block", weight="bold")
    x = 20.0
    for name, keys in (("a", 150), ("b", 40), ("c", 290), ("d", 120)):
        p.box(x, 40, keys, 24, GREY, f"keys of request {name}" if keys > 100 else name)
        x += keys
    for block in range(6):
        p.box(20 + 100 * block, 84, 100, 24, COLOURS[block], f"block {block}")
        p.arrow(70 + 100 * block, 66, 70 + 100 * block, 82)
    p.text(640, 56, "A range may end inside a request:")
    p.text(640, 72, "block 1 has the end of a, all of b")
    p.text(640, 88, "and the beginning of c.")


def draw_decode_block(p: Picture) -> None:
    """Draw the warps of a decode block, which take turns in its keys, and the merge of their states."""
    p.text(20, 146, "Inside a decode block: each warp streams its own keys, 16 of each 64", weight="bold")
    for step in range(8):
        p.box(20 + 60 * step, 160, 60, 22, COLOURS[step % 4], f"16: w{step % 4}")
    for warp in range(4):
        y = 200 + 30 * warp
        p.box(20, y, 150, 22, COLOURS[warp], f"warp {warp}: ring of copies")
        p.arrow(170, y + 11, 208, y + 11)
        p.box(210, y, 160, 22, COLOURS[warp], "maximum, sum, output")
        p.arrow(370, y + 11, 418, 256)
    p.box(420, 240, 130, 32, GREY, "merge in the block")
    p.arrow(550, 256, 598, 256)
    p.box(600, 226, 250, 60, GREY)
    p.text(612, 250, "request in one range: output")
    p.text(612, 270, "request in several: partial state")


def draw_prefill_list(p: Picture) -> None:
    """Draw the tiles of query rows of two requests, the steps over keys of one tile, and the rows of its warps."""
    p.text(20, 352, "Prefill list: one block per tile of query rows and KV head, longest first", weight="bold")
    for tile, keys in enumerate((5, 4, 3, 2)):
        y = 366 + 30 * tile
        p.box(20, y, 110, 26, COLOURS[tile], f"tile {tile} of rows")
        for step in range(keys):
            p.box(140 + 62 * step, y, 60, 26, GREY, f"keys {step}")
    p.text(
        140, 500, "Causal: tiles of later rows see more keys. Two buffers: step i + 1 is copied while step i is used."
    )
    p.arrow(452, 379, 518, 379)
    for warp in range(4):
        p.box(520, 366 + 30 * warp, 330, 26, COLOURS[0], f"warp {warp}: 16 or 32 rows of the tile, all keys")


def draw_merge(p: Picture) -> None:
    p.text(20, 540, "Split keys: partial states (output and LSE) in the workspace, then one merge", weight="bold")
    for part in range(3):
        p.box(20 + 130 * part, 554, 120, 26, COLOURS[part], f"part {part}")
        p.arrow(80 + 130 * part, 580, 80 + 130 * part, 600)
    p.box(20, 602, 380, 26, GREY, "the block that finishes last merges, one warp per row")
    p.arrow(400, 615, 448, 615)
    p.box(450, 602, 140, 26, GREY, "output and LSE")


def attention() -> str:
    p = Picture(880, 646)
    for draw in (draw_decode_list, draw_decode_block, draw_prefill_list, draw_merge):
        draw(p)
    return p.finish()


def draw_prefill_sm90(p: Picture) -> None:
    """Draw the roles in a block of the Hopper prefill kernel: item counter, producer, rings, and consumers' turns."""
    p.text(
        20,
        24,
        "Prefill on Hopper: a producer warpgroup fills rings, consumers of 64 rows each empty them",
        weight="bold",
    )
    p.box(20, 40, 150, 40, GREY, "counter of work items")
    p.arrow(170, 60, 208, 60)
    p.box(210, 40, 170, 40, COLOURS[1], "producer: TMA copies")
    for ring, y in (("keys", 96), ("values", 130)):
        p.text(210, y + 17, f"ring of {ring}")
        for stage in range(2):
            p.box(300 + 90 * stage, y, 88, 26, COLOURS[1], f"tile {stage}")
    p.arrow(340, 80, 340, 94)
    p.arrow(480, 126, 518, 76)
    p.arrow(480, 126, 518, 126)
    for group in range(2):
        p.box(
            520,
            50 + 50 * group,
            340,
            40,
            COLOURS[2 + group],
            f"consumer {group}: rows {64 * group} to {64 * group + 63}, all keys",
        )
    p.text(
        20,
        186,
        "The consumers take turns: one multiplies on the tensor cores while the other computes softmax weights.",
    )
    for group in range(2):
        y = 200 + 34 * group
        p.text(20, y + 18, f"consumer {group}")
        for step in range(4):
            is_product = step % 2 == group
            colour = COLOURS[2 + group] if is_product else GREY
            words = f"S({3 - step}) and P V({4 - step})" if is_product and step else "softmax"
            p.box(110 + 190 * step, y, 188, 28, colour, "S = Q K" if step == group == 0 else words)
    p.text(110, 282, "time: last keys first, so that masked steps come first")


def draw_mla_sm90(p: Picture) -> None:
    """Draw the columns and key blocks that the two consumers of the Hopper MLA kernel share."""
    p.text(
        20,
        324,
        "MLA on Hopper: 64 rows, keys in pairs of blocks of 64, output columns split over two consumers",
        weight="bold",
    )
    for block in range(2):
        y = 340 + 40 * block
        p.box(20, y, 150, 30, COLOURS[block], f"keys of block {block}")
        p.arrow(170, y + 15, 208, y + 15)
        p.box(210, y, 220, 30, COLOURS[2 + block], f"consumer {block}: scores, weights P{block}")
        p.arrow(430, y + 15, 468, 375)
    p.box(470, 354, 130, 42, GREY, "P0, P1 in shared memory")
    for half, columns in enumerate(("0 to 255", "256 to 511")):
        y = 340 + 40 * half
        p.arrow(600, 375, 638, y + 15)
        p.box(640, y, 220, 30, COLOURS[2 + half], f"consumer {half}: columns {columns}")
    p.text(
        20,
        440,
        "Values are the first 512 columns of the keys, in the same shared memory. The first buffer is free, and keys",
    )
    p.text(20, 456, "of the next pair arrive in it, while the second block is multiplied.")


def attention_sm90() -> str:
    p = Picture(880, 472)
    for draw in (draw_prefill_sm90, draw_mla_sm90):
        draw(p)
    return p.finish()


def draw_estimate(p: Picture) -> None:
    """Draw the sample of a row, its bins, and the range that contains the threshold."""
    p.text(20, 24, "1. Each block estimates a range for the threshold from a sample of the row", weight="bold")
    p.box(20, 38, 840, 22, GREY)
    for x in range(40, 860, 40):
        p.box(x, 38, 3, 22, COLOURS[1])
    p.text(860, 74, "one row of probabilities, 128256 columns", "end")
    p.arrow(440, 62, 440, 80)
    for i, height in enumerate((8, 14, 24, 38, 52, 46, 34, 22, 14, 9, 6, 4)):
        p.box(200 + 40 * i, 138 - height, 36, height, COLOURS[0] if i not in (7, 8) else COLOURS[1])
    p.text(190, 154, "light", "end")
    p.text(690, 154, "heavy")
    p.text(516, 154, "range with the threshold", "middle")
    p.text(20, 110, "4096 columns")
    p.text(20, 126, "counted in bins")


def draw_pass(p: Picture) -> None:
    """Draw the blocks of a cluster, the chunks that warps read, and what happens to each column."""
    p.text(20, 196, "2. A cluster of blocks reads the row once, in chunks", weight="bold")
    for block in range(4):
        p.box(20 + 210 * block, 210, 210, 24, COLOURS[block], f"block {block} of the cluster")
        for chunk in range(7):
            p.box(20 + 210 * block + 30 * chunk, 236, 30, 20, GREY, f"w{chunk % 4}")
        p.arrow(125 + 210 * block, 258, 125 + 210 * block, 276)
    p.box(20, 278, 270, 40, COLOURS[2], "above the range: added to the chunk's sum")
    p.box(300, 278, 270, 40, COLOURS[1], "within the range: listed as a candidate")
    p.box(580, 278, 280, 40, GREY, "below the range: dropped")


def draw_leader(p: Picture) -> None:
    """Draw the steps of the leading block."""
    p.text(20, 354, "3. The leading block finds the exact threshold, a chunk and the column", weight="bold")
    steps = (
        "threshold among candidates",
        "sums of chunks, prefix sums",
        "chunk of the random number",
        "chunk read again",
    )
    for i, words in enumerate(steps):
        p.box(20 + 212 * i, 368, 190, 30, COLOURS[i], words)
        if i:
            p.arrow(212 * i, 383, 18 + 212 * i, 383)
    p.text(
        20,
        424,
        "Range wrong, or list too short: a better range from the sums so far, then a fine estimate, then an exact",
    )
    p.text(20, 440, "search of the row. A wrong estimate costs time, never correctness.")


def sampling() -> str:
    p = Picture(880, 456)
    for draw in (draw_estimate, draw_pass, draw_leader):
        draw(p)
    return p.finish()


PICTURES = {
    "kernels_attention.svg": attention,
    "kernels_attention_sm90.svg": attention_sm90,
    "kernels_sampling.svg": sampling,
}


def main() -> None:
    for name, draw in PICTURES.items():
        path, text = DOCS / name, draw()
        if sys.argv[1:] == ["--write"]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            sys.exit(f"docs/{name} is not current; run python scripts/draw_kernels.py --write")


if __name__ == "__main__":
    main()
