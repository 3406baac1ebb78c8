//! Paths inside a job's name space and inside a volume, as text. It touches no file system.

use bafs_proto::path::is_control_or_bidirectional;

use super::limits::{PART_BYTES_MAX, PATH_BYTES_MAX};

/// Directories that the kernel fills; a volume there would hide them from the job.
const KERNEL_DIRECTORIES: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Why a path is refused, as the end of a sentence that begins with what the path is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathError {
    NotAbsolute,
    NotRelative,
    Dots,
    Root,
    Kernel,
    Long,
    LongPart,
}

impl PathError {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::NotAbsolute => "is not absolute",
            Self::NotRelative => "is absolute, but is looked for inside the volume",
            Self::Dots => "contains '.' or '..'",
            Self::Root => "names no file or directory",
            Self::Kernel => "lies under /proc, /sys or /dev",
            Self::Long => "is longer than 4095 bytes, or contains control characters",
            Self::LongPart => "has a name of more than 255 bytes in it",
        }
    }
}

/// A path of the name space, with single slashes.
pub(super) fn absolute(text: &str) -> Result<String, PathError> {
    if !text.starts_with('/') {
        return Err(PathError::NotAbsolute);
    }
    Ok(format!("/{}", parts(text)?))
}

/// A path of the name space that a volume may be mounted at.
pub(super) fn mount_point(text: &str) -> Result<String, PathError> {
    let path = absolute(text)?;
    if path == "/" {
        return Err(PathError::Root);
    }
    if KERNEL_DIRECTORIES
        .iter()
        .any(|directory| is_inside(&path, directory))
    {
        return Err(PathError::Kernel);
    }
    Ok(path)
}

/// A path inside a volume, without a leading slash.
pub(super) fn relative(text: &str) -> Result<String, PathError> {
    if text.starts_with('/') {
        return Err(PathError::NotRelative);
    }
    let path = parts(text)?;
    if path.is_empty() {
        Err(PathError::Root)
    } else {
        Ok(path)
    }
}

/// A path of the name space that may be written relative to `directory`.
pub(super) fn joined(directory: &str, text: &str) -> Result<String, PathError> {
    if text.starts_with('/') {
        return absolute(text);
    }
    let path = relative(text)?;
    absolute(&format!("{}/{path}", directory.trim_end_matches('/')))
}

/// Whether `path` is `directory` or lies in it; both are normalised.
pub(super) fn is_inside(path: &str, directory: &str) -> bool {
    match path.strip_prefix(directory) {
        Some(rest) => rest.is_empty() || rest.starts_with('/') || directory == "/",
        None => false,
    }
}

fn parts(text: &str) -> Result<String, PathError> {
    if text.len() > PATH_BYTES_MAX || text.contains(is_control_or_bidirectional) {
        return Err(PathError::Long);
    }
    let parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty()).collect();
    if parts.iter().any(|part| matches!(*part, "." | "..")) {
        return Err(PathError::Dots);
    }
    if parts.iter().any(|part| part.len() > PART_BYTES_MAX) {
        return Err(PathError::LongPart);
    }
    Ok(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        assert_eq!(mount_point("//data/x/"), Ok("/data/x".to_owned()));
        assert_eq!(mount_point("data"), Err(PathError::NotAbsolute));
        assert_eq!(mount_point("//"), Err(PathError::Root));
        assert_eq!(mount_point("/sys/x"), Err(PathError::Kernel));
        assert_eq!(mount_point("/system"), Ok("/system".to_owned()));
        assert_eq!(mount_point("/a/../b"), Err(PathError::Dots));
        let long = "x".repeat(256);
        assert_eq!(absolute(&format!("/a/{long}/b")), Err(PathError::LongPart));
        assert_eq!(relative(&long), Err(PathError::LongPart));
        assert_eq!(relative(&"a/".repeat(2_048)), Err(PathError::Long));
        assert_eq!(relative("a//b"), Ok("a/b".to_owned()));
        assert_eq!(relative("/a"), Err(PathError::NotRelative));
        assert_eq!(relative(""), Err(PathError::Root));
        assert_eq!(joined("/", "x"), Ok("/x".to_owned()));
        assert_eq!(joined("/w", "x/y"), Ok("/w/x/y".to_owned()));
        assert_eq!(joined("/w", "/x"), Ok("/x".to_owned()));
        assert!(is_inside("/a/b", "/a") && is_inside("/a", "/a") && is_inside("/a", "/"));
        assert!(!is_inside("/ab", "/a"));
    }
}
