//! Text in pages and pictures that people open in a browser.

use std::fmt::Write;

use bafs_proto::path::is_control_or_bidirectional;

/// Text as a page shows it, whatever is in it.
pub(crate) fn escape_html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            c if is_control_or_bidirectional(c) && c != '\n' && c != '\t' => {
                escaped.push('\u{fffd}')
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// A path as a link names it: letters and digits, and what has no meaning there.
pub(crate) fn encode_link(path: &[u8]) -> String {
    let mut link = String::with_capacity(path.len());
    for byte in path {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                link.push(char::from(*byte));
            }
            _ => {
                let _ = write!(link, "%{byte:02X}");
            }
        }
    }
    link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_no_special_characters() {
        assert_eq!(encode_link(b"w.logs/a-b_1.2.err"), "w.logs/a-b_1.2.err");
        assert_eq!(
            encode_link("a\"<é :#?".as_bytes()),
            "a%22%3C%C3%A9%20%3A%23%3F"
        );
    }
}
