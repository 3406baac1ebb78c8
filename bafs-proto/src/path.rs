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

/// Checks that `name` is one plain component of a path, without control characters: people type
/// it, and it is shown in lists and may name a directory.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = check_relative(name).is_ok() && !name.is_empty() && !name.contains('/');
    if is_plain && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let text = format!(
        "'{}' is no name: take 1 to {NAME_BYTES_MAX} bytes without '/' and control characters, and \
         neither '.' nor '..'",
        name.escape_debug()
    );
    Err(Error::new(ErrorCode::BadPath, text))
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
    fn a_name_is_one_plain_component() {
        for good in ["a", "b.c", "..a", "a b", "-", "größe"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "../x", "a/b", "/a", "a/", "a\n", "a\0"] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert!(check_name(&"x".repeat(NAME_BYTES_MAX + 1)).is_err());
    }
}
