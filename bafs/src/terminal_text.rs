//! Text for a terminal: names, messages and outputs come from others, and what is in them must not
//! steer it. The one place where that is decided.

use bafs_proto::path::{self, is_control_or_bidirectional};

/// One line without control and bidirectional characters, which would move, colour, clear or turn
/// round what is shown.
pub(crate) fn sanitize_line(text: &str) -> String {
    path::printable(text).chars().map(sanitize_char).collect()
}

/// Several lines, perhaps with tabs, without the other control characters.
pub(crate) fn sanitize_lines(text: &str) -> String {
    let is_layout = |c: char| matches!(c, '\n' | '\t');
    let shown = |c: char| if is_layout(c) { c } else { sanitize_char(c) };
    path::printable(text).chars().map(shown).collect()
}

fn sanitize_char(c: char) -> char {
    if is_control_or_bidirectional(c) {
        char::REPLACEMENT_CHARACTER
    } else {
        c
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_names_are_replaced() {
        let bidi = "ok\u{202e}gnp\u{2066}.\u{2028}";
        assert_eq!(sanitize_lines(bidi), "ok\u{fffd}gnp\u{fffd}.\u{fffd}");
        let name = "n\u{1b}[31m1\n\t\u{7}\u{9b}größe";
        assert_eq!(
            sanitize_line(name),
            "n\u{fffd}[31m1\u{fffd}\u{fffd}\u{fffd}\u{fffd}größe"
        );
        assert_eq!(
            sanitize_lines(name),
            "n\u{fffd}[31m1\n\t\u{fffd}\u{fffd}größe"
        );
        assert_eq!(
            sanitize_line(&path::from_bytes(b"\xe9\x1b")),
            "\\xE9\u{fffd}"
        );
    }
}
