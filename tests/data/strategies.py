"""What hypothesis draws from in several files."""

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
