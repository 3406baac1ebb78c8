//! Paths from the wire: relative, plain components only; touches no file system.
//!
//! A name on Linux is bytes, and a path here is text: in tokens, journals, manifests and messages.
//! So each byte that is no part of UTF-8 text stands as one character of its own, from U+EF80 (for
//! the byte 0x80) to U+EFFF. Where a name really has such a character, the bytes of that stand so.
//! Each name thus has exactly one text, that of a name in UTF-8 is that name, and a text that is no
//! name's is refused: two names are never one resource, and one name is never two.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::path::Path;

use crate::error::{Error, ErrorCode, Result};
use crate::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX};

/// Stand for the bytes 0x80 to 0xFF: private characters that MirBSD uses for the same.
const ESCAPED_BYTES: RangeInclusive<char> = '\u{ef80}'..='\u{efff}';

/// The byte 0x80 stands so far above itself.
const ESCAPED_BYTES_OFFSET: u32 = 0xef00;

/// Directories that the kernel fills; a volume there would hide them from a job.
const KERNEL_DIRECTORIES: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Where a job has the programs that its workflow brings, each a mount of its name. The directory
/// comes first on the job's `PATH`.
pub const PROGRAM_DIRECTORY: &str = "/bafs/bin";

/// Where a job has the scripts beside its workflow.
pub const SCRIPT_DIRECTORY: &str = "/bafs/scripts";

/// Whether a job has a program there that its workflow brings: a file, by a name that need not be
/// that of its source.
pub fn is_program_place(path: &str) -> bool {
    [PROGRAM_DIRECTORY, SCRIPT_DIRECTORY]
        .into_iter()
        .any(|directory| Path::new(path).starts_with(directory))
}

/// The mount path of a volume that is the whole root directory of a job.
pub const ROOT_PATH: &str = "/";

/// Why a volume is not mounted there, as the end of a sentence that begins with the path.
pub const KERNEL_DIRECTORY_OBJECTION: &str = "lies under /proc, /sys or /dev";

/// Whether an absolute path is one of the directories that the kernel fills, or lies in one.
pub fn is_in_kernel_directory(path: &Path) -> bool {
    KERNEL_DIRECTORIES
        .iter()
        .any(|directory| path.starts_with(directory))
}

/// The text of a path or name that is these bytes.
pub fn from_bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    let stand_in = |byte: u8| char::from_u32(ESCAPED_BYTES_OFFSET + u32::from(byte));
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if ESCAPED_BYTES.contains(&c) {
                text.extend(c.encode_utf8(&mut [0; 4]).bytes().filter_map(stand_in));
            } else {
                text.push(c);
            }
        }
        text.extend(chunk.invalid().iter().copied().filter_map(stand_in));
    }
    text
}

/// The bytes of the path or name whose text this is.
pub fn to_bytes(text: &str) -> Cow<'_, [u8]> {
    if !text.contains(is_escaped_byte) {
        return Cow::Borrowed(text.as_bytes());
    }
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match u8::try_from(u32::from(c).wrapping_sub(ESCAPED_BYTES_OFFSET)) {
            Ok(byte) if is_escaped_byte(c) => bytes.push(byte),
            _ => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    Cow::Owned(bytes)
}

/// The text as people read it: `\xE9` for a byte that is no text.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_escaped_byte) {
        return Cow::Borrowed(text);
    }
    let mut readable = String::with_capacity(text.len());
    for c in text.chars() {
        if is_escaped_byte(c) {
            readable.push_str(&format!("\\x{:02X}", u32::from(c) - ESCAPED_BYTES_OFFSET));
        } else {
            readable.push(c);
        }
    }
    Cow::Owned(readable)
}

fn is_escaped_byte(c: char) -> bool {
    ESCAPED_BYTES.contains(&c)
}

/// Whether a text is the one of the bytes that it stands for.
fn is_canonical(text: &str) -> bool {
    !text.contains(is_escaped_byte) || from_bytes(&to_bytes(text)) == text
}

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
    if to_bytes(path).len() > PATH_BYTES_MAX {
        return Err(Error::new(ErrorCode::BadPath, "path is too long"));
    }
    if !is_canonical(path) {
        return bad("names bytes that have another text");
    }
    if path.contains('\0') {
        return bad("contains a zero byte");
    }
    for component in path.split('/') {
        match component {
            "" => return bad("is absolute or has an empty component"),
            "." | ".." => return bad("has a '.' or '..' component"),
            _ if to_bytes(component).len() > NAME_BYTES_MAX => {
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
    if is_plain
        && !name
            .chars()
            .any(|c| is_control_or_bidirectional(c) || is_invisible(c))
    {
        return Ok(());
    }
    let text = format!(
        "'{}' is not a name; use 1 to {NAME_BYTES_MAX} bytes without '/', control, bidirectional \
         and invisible characters, and neither '.' nor '..'",
        name.escape_debug()
    );
    Err(Error::new(ErrorCode::BadPath, text))
}

/// Checks that a file may be put at `path` for people: as [`check_relative`], and nothing in it
/// steers the terminal of whoever lists it.
pub fn check_result_path(path: &str) -> Result<()> {
    check_relative(path)?;
    check_printable(path)
}

/// Checks that nothing in a text that people will read steers what they see.
pub fn check_printable(text: &str) -> Result<()> {
    if !text.contains(is_control_or_bidirectional) {
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
pub fn is_control_or_bidirectional(c: char) -> bool {
    c.is_control()
        || BIDIRECTIONAL_OR_SEPARATOR
            .iter()
            .any(|range| range.contains(&c))
}

/// Whether a character takes no room, so that two names look the same.
fn is_invisible(c: char) -> bool {
    INVISIBLE.iter().any(|range| range.contains(&c))
}

/// Bidirectional marks, embeddings and isolates, and separators of lines and paragraphs.
const BIDIRECTIONAL_OR_SEPARATOR: [RangeInclusive<char>; 4] = [
    '\u{61c}'..='\u{61c}',
    '\u{200e}'..='\u{200f}',
    '\u{2028}'..='\u{202e}',
    '\u{2066}'..='\u{2069}',
];

/// `Default_Ignorable_Code_Point` of Unicode, and interlinear annotations, without
/// [`BIDIRECTIONAL_OR_SEPARATOR`].
const INVISIBLE: [RangeInclusive<char>; 14] = [
    '\u{ad}'..='\u{ad}',
    '\u{34f}'..='\u{34f}',
    '\u{115f}'..='\u{1160}',
    '\u{17b4}'..='\u{17b5}',
    '\u{180b}'..='\u{180f}',
    '\u{200b}'..='\u{200d}',
    '\u{2060}'..='\u{2065}',
    '\u{206a}'..='\u{206f}',
    '\u{3164}'..='\u{3164}',
    '\u{fe00}'..='\u{fe0f}',
    '\u{feff}'..='\u{feff}',
    '\u{ffa0}'..='\u{ffa0}',
    '\u{fff9}'..='\u{fffb}',
    '\u{e0000}'..='\u{e0fff}',
];

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
    fn result_paths_with_control_characters_are_refused() {
        // Persian needs the joiner.
        for good in ["", "results/größe", "a b/c", "می\u{200c}خواهم"] {
            assert!(check_result_path(good).is_ok(), "{good}");
        }
        for bad in [
            "nl\n",
            "\u{1b}[31mx",
            "a/ok\u{202e}gnp",
            "a\u{2028}b",
            "x\u{9b}1m",
            "../a",
        ] {
            let refused = check_result_path(bad).expect_err(bad);
            assert!(
                !refused.detail.contains(is_control_or_bidirectional),
                "{refused}"
            );
        }
    }

    #[test]
    fn each_name_has_exactly_one_encoding() {
        let names: [&[u8]; 8] = [
            b"plain",
            "größe".as_bytes(),
            b"\xe9chantillon",
            b"a/\xff\x80/b",
            "\u{ef80}".as_bytes(),
            "x\u{efe9}\u{efff}".as_bytes(),
            b"\xee\xbe",
            b"\xc3\xa9\xc3",
        ];
        let texts: Vec<_> = names.iter().map(|name| from_bytes(name)).collect();
        for (at, (name, text)) in names.iter().zip(&texts).enumerate() {
            assert_eq!(*to_bytes(text), **name, "{text}");
            assert!(check_relative(text).is_ok(), "{text}");
            assert!(!texts[..at].contains(text), "{text}");
        }
        assert_eq!(texts[1], "größe", "text is itself");
        // Bytes that are text, here `é`, do not stand as bytes.
        for other in ["\u{efc3}\u{efa9}", "\u{efee}\u{efbe}x/\u{efc3}\u{efa9}"] {
            assert!(check_relative(other).is_err(), "{other}");
        }
        // No stand-in is a slash, a dot or a zero.
        assert!(
            ESCAPED_BYTES
                .clone()
                .all(|c| to_bytes(&c.to_string())[0] >= 0x80)
        );
    }

    #[test]
    fn path_lengths_are_counted_in_bytes() {
        let longest = from_bytes(&[0xe9; NAME_BYTES_MAX]);
        assert!(check_relative(&longest).is_ok());
        assert!(check_relative(&from_bytes(&[0xe9; NAME_BYTES_MAX + 1])).is_err());
        let path = [longest.as_str(); 16].join("/");
        assert!(check_relative(&path).is_ok(), "4095 bytes");
        assert!(check_relative(&join("x", &path)).is_err());
    }

    #[test]
    fn non_utf8_bytes_are_displayed_as_escapes() {
        assert_eq!(printable(&from_bytes(b"\xe9chantillon")), "\\xE9chantillon");
        assert_eq!(printable("größe"), "größe");
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
