"""SVGs are written without what draws nothing."""

import io
import re
import xml.etree.ElementTree as ET

from kvforge.common.figures import compact_svg, new_figure


def test_a_compact_svg_draws_the_same() -> None:
    figure = new_figure(3, 2)
    figure.subplots().plot([0, 1e-7, 2], [3, 1, 2], marker="o", label="a  b")
    written = io.BytesIO()
    figure.savefig(written, format="svg")
    before, after = (ET.fromstring(data) for data in (written.getvalue(), compact_svg(written.getvalue())))
    before.remove(before[0])  # metadata

    def drawn(root: ET.Element) -> list:
        words = re.compile(r"[A-Za-z]|[^A-Za-z\s]+")
        return [(one.tag, {**one.attrib, "d": words.findall(one.get("d", ""))}, (one.text or "").strip())
                for one in root.iter()]  # fmt: skip

    assert drawn(before) == drawn(after) and len(compact_svg(written.getvalue())) < len(written.getvalue())
