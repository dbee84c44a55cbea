"""The program that Streamlit runs for each visitor: admission, the pickers, the pages."""

import streamlit as st
from PIL import Image, ImageDraw

from quire_dashboard.admission import is_admitted
from quire_dashboard.choice import pickers
from quire_dashboard.views import ended, engine, incidents, kv_cache, load, overview, playground, requests


def main() -> None:
    """One run of the script."""
    st.set_page_config(page_title="Quire", page_icon=_icon(), layout="wide")
    if not is_admitted():
        return
    page = st.navigation(
        [
            st.Page(overview.show, title="Overview", icon=":material/dashboard:", url_path="overview", default=True),
            st.Page(kv_cache.show, title="KV cache", icon=":material/grid_view:", url_path="kv-cache"),
            st.Page(requests.show, title="Requests", icon=":material/list:", url_path="requests"),
            st.Page(ended.show, title="Slow & failed", icon=":material/running_with_errors:", url_path="ended"),
            st.Page(incidents.show, title="Incidents", icon=":material/crisis_alert:", url_path="incidents"),
            st.Page(engine.show, title="Engine", icon=":material/memory:", url_path="engine"),
            st.Page(playground.show, title="Playground", icon=":material/chat:", url_path="playground"),
            st.Page(load.show, title="Load", icon=":material/speed:", url_path="load"),
        ]
    )
    pickers()
    page.run()


def _icon() -> Image.Image:
    """Four blocks, one of them in use. A named icon would be fetched from the Internet."""
    image = Image.new("RGBA", (32, 32))
    draw = ImageDraw.Draw(image)
    for x, y, colour in ((2, 2, "#2f6fc4"), (18, 2, "#9aa0a6"), (2, 18, "#9aa0a6"), (18, 18, "#f2a33a")):
        draw.rectangle((x, y, x + 11, y + 11), fill=colour)
    return image


if __name__ == "__main__":
    main()
