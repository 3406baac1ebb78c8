//! Paths from the wire: relative, plain components only; touches no file system.

use crate::error::{Error, ErrorCode, Result};
use crate::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX};

/// Checks that `path` stays below the directory it is relative to: no leading slash, no empty,
/// `.` or `..` component, no zero byte, lengths within the limits. The empty path is that
/// directory itself.
pub fn check_relative(path: &str) -> Result<()> {
    let bad = |why: &str| {
        Err(Error::new(
            ErrorCode::BadPath,
            format!("path '{path}' {why}"),
        ))
    };
    if path.is_empty() {
        return Ok(());
    }
    if path.len() > PATH_BYTES_MAX {
        return Err(Error::new(ErrorCode::BadPath, "path is too long"));
    }
    if path.contains('\0') {
        return bad("contains a zero byte");
    }
    for component in path.split('/') {
        match component {
            "" => return bad("is absolute or has an empty component"),
            "." | ".." => return bad("has a '.' or '..' component"),
            _ if component.len() > NAME_BYTES_MAX => {
                return bad("has a component that is too long");
            }
            _ => {}
        }
    }
    Ok(())
}

/// The path of what is at `path` below `base`; either may be empty.
pub fn join(base: &str, path: &str) -> String {
    match (base, path) {
        (base, "") => base.to_owned(),
        ("", path) => path.to_owned(),
        (base, path) => format!("{base}/{path}"),
    }
}

/// Checks that `name` is one plain component of a path, whose every character is seen as what it
/// is: people type it, and it is shown in lists and may name a directory.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = check_relative(name).is_ok() && !name.is_empty() && !name.contains('/');
    if is_plain && !name.chars().any(|c| steers_text(c) || is_unseen(c)) {
        return Ok(());
    }
    let text = format!(
        "'{}' is no name: take 1 to {NAME_BYTES_MAX} bytes without '/', control, bidirectional and \
         invisible characters, and neither '.' nor '..'",
        name.escape_debug()
    );
    Err(Error::new(ErrorCode::BadPath, text))
}

/// Checks that a file may be put at `path` for people: as [`check_relative`], and nothing in it
/// steers the terminal of whoever lists it.
pub fn check_result(path: &str) -> Result<()> {
    check_relative(path)?;
    check_text(path)
}

/// Checks that nothing in a text that people will read steers what they see.
pub fn check_text(text: &str) -> Result<()> {
    if !text.contains(steers_text) {
        return Ok(());
    }
    let why = format!(
        "'{}' has control or bidirectional characters, which terminals obey; choose another name",
        text.escape_debug()
    );
    Err(Error::new(ErrorCode::BadPath, why))
}

/// Whether terminals and editors obey a character instead of showing it: control characters, and
/// those that begin lines or change the direction of writing.
pub fn steers_text(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Whether a character takes no room, so that two names look the same.
fn is_unseen(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2065}' | '\u{206a}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_relative_paths_pass() {
        for good in ["", "a", "a/b.c", "..a", "a b"] {
            assert!(check_relative(good).is_ok(), "{good}");
        }
        for bad in ["/a", "a/", "a//b", "..", "a/../b", "./a", "a\0"] {
            assert!(check_relative(bad).is_err(), "{bad}");
        }
        assert!(check_relative(&"x".repeat(NAME_BYTES_MAX + 1)).is_err());
    }

    #[test]
    fn result_paths_steer_no_terminal() {
        // Persian needs the joiner.
        for good in ["", "results/größe", "a b/c", "می\u{200c}خواهم"] {
            assert!(check_result(good).is_ok(), "{good}");
        }
        for bad in [
            "nl\n",
            "\u{1b}[31mx",
            "a/ok\u{202e}gnp",
            "a\u{2028}b",
            "x\u{9b}1m",
            "../a",
        ] {
            let refused = check_result(bad).expect_err(bad);
            assert!(!refused.detail.contains(steers_text), "{refused}");
        }
    }

    #[test]
    fn a_name_is_one_plain_component() {
        for good in ["a", "b.c", "..a", "a b", "-", "größe"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "../x", "a/b", "/a", "a/", "a\n", "a\0"] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        // The direction of writing, zero width, a tag, a blank letter.
        for bad in [
            "ok\u{202e}gnp",
            "a\u{2066}",
            "a\u{200b}",
            "a\u{feff}",
            "a\u{e0041}",
            "a\u{3164}",
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name(&"x".repeat(NAME_BYTES_MAX + 1)).is_err());
    }
}
