//! Paths inside a job's name space and inside a volume, as text. It touches no file system.

use std::path::Path;

use bafs_proto::path::{
    KERNEL_DIRECTORY_OBJECTION, is_control_or_bidirectional, is_in_kernel_directory,
};

use super::limits::{PATH_BYTES_MAX, PATH_NAME_BYTES_MAX};

/// Why a path is refused, as the end of a sentence that begins with what the path is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathError {
    NotAbsolute,
    NotRelative,
    DotComponent,
    Root,
    KernelDirectory,
    TooLong,
    ComponentTooLong,
}

impl PathError {
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::NotAbsolute => "is not absolute",
            Self::NotRelative => "is absolute, but must be relative to the volume",
            Self::DotComponent => "contains '.' or '..'",
            Self::Root => "names no file or directory",
            Self::KernelDirectory => KERNEL_DIRECTORY_OBJECTION,
            Self::TooLong => "is longer than 4095 bytes, or contains control characters",
            Self::ComponentTooLong => "has a name of more than 255 bytes in it",
        }
    }
}

/// A path of the name space, with single slashes.
pub(super) fn parse_absolute(text: &str) -> Result<String, PathError> {
    if !text.starts_with('/') {
        return Err(PathError::NotAbsolute);
    }
    Ok(format!("/{}", normalise_components(text)?))
}

/// A path of the name space that a volume may be mounted at.
pub(super) fn parse_mount_point(text: &str) -> Result<String, PathError> {
    let path = parse_absolute(text)?;
    if path == "/" {
        return Err(PathError::Root);
    }
    if is_in_kernel_directory(Path::new(&path)) {
        return Err(PathError::KernelDirectory);
    }
    Ok(path)
}

/// A path inside a volume, without a leading slash.
pub(super) fn parse_relative(text: &str) -> Result<String, PathError> {
    if text.starts_with('/') {
        return Err(PathError::NotRelative);
    }
    let path = normalise_components(text)?;
    if path.is_empty() {
        Err(PathError::Root)
    } else {
        Ok(path)
    }
}

/// A path of the name space that may be written relative to `directory`.
pub(super) fn join_path(directory: &str, text: &str) -> Result<String, PathError> {
    if text.starts_with('/') {
        return parse_absolute(text);
    }
    let path = parse_relative(text)?;
    parse_absolute(&format!("{}/{path}", directory.trim_end_matches('/')))
}

/// Whether `path` is `directory` or lies in it; both are normalised.
pub(super) fn is_inside(path: &str, directory: &str) -> bool {
    match path.strip_prefix(directory) {
        Some(rest) => rest.is_empty() || rest.starts_with('/') || directory == "/",
        None => false,
    }
}

fn normalise_components(text: &str) -> Result<String, PathError> {
    if text.len() > PATH_BYTES_MAX || text.contains(is_control_or_bidirectional) {
        return Err(PathError::TooLong);
    }
    let parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty()).collect();
    if parts.iter().any(|part| matches!(*part, "." | "..")) {
        return Err(PathError::DotComponent);
    }
    if parts.iter().any(|part| part.len() > PATH_NAME_BYTES_MAX) {
        return Err(PathError::ComponentTooLong);
    }
    Ok(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_normalised_or_rejected() {
        assert_eq!(parse_mount_point("//data/x/"), Ok("/data/x".to_owned()));
        assert_eq!(parse_mount_point("data"), Err(PathError::NotAbsolute));
        assert_eq!(parse_mount_point("//"), Err(PathError::Root));
        assert_eq!(parse_mount_point("/sys/x"), Err(PathError::KernelDirectory));
        assert_eq!(parse_mount_point("/system"), Ok("/system".to_owned()));
        assert_eq!(parse_mount_point("/a/../b"), Err(PathError::DotComponent));
        let long = "x".repeat(256);
        assert_eq!(
            parse_absolute(&format!("/a/{long}/b")),
            Err(PathError::ComponentTooLong)
        );
        assert_eq!(parse_relative(&long), Err(PathError::ComponentTooLong));
        assert_eq!(parse_relative(&"a/".repeat(2_048)), Err(PathError::TooLong));
        assert_eq!(parse_relative("a//b"), Ok("a/b".to_owned()));
        assert_eq!(parse_relative("/a"), Err(PathError::NotRelative));
        assert_eq!(parse_relative(""), Err(PathError::Root));
        assert_eq!(join_path("/", "x"), Ok("/x".to_owned()));
        assert_eq!(join_path("/w", "x/y"), Ok("/w/x/y".to_owned()));
        assert_eq!(join_path("/w", "/x"), Ok("/x".to_owned()));
        assert!(is_inside("/a/b", "/a") && is_inside("/a", "/a") && is_inside("/a", "/"));
        assert!(!is_inside("/ab", "/a"));
    }
}
