"""SVGs are written without what draws nothing."""

import io
import re
import xml.etree.ElementTree as ET

import matplotlib

from kvforge.common.figures import compact_svg, new_figure


def test_a_compact_svg_draws_the_same() -> None:
    figure = new_figure(3, 2)
    figure.subplots().plot([0, 1e-7, 2], [3, 1, 2], marker="o", label="a  b")
    written = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg")
    before, after = (ET.fromstring(data) for data in (written.getvalue(), compact_svg(written.getvalue())))
    before.remove(before[0])  # metadata

    def attributes(one: ET.Element) -> dict:
        """A text's first font, which is there, draws it; a group's name and a turn by nothing draw nothing."""
        found = {**one.attrib, "d": re.findall(r"[A-Za-z]|[^A-Za-z\s]+", one.get("d", ""))}
        found["style"] = re.sub(r"(font-family: '[^']*')[^;]*", r"\1", one.get("style", ""))
        if one.tag.endswith("}g"):
            found.pop("id", None)
        if found.get("transform", "").startswith("rotate(-0 "):
            del found["transform"]
        return found

    def drawn(root: ET.Element) -> list:
        return [(one.tag, attributes(one), (one.text or "").strip()) for one in root.iter()]

    assert drawn(before) == drawn(after) and len(compact_svg(written.getvalue())) < len(written.getvalue())
