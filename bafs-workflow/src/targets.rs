//! What extracts send and where it goes: each target is writable, has one file or set of its own,
//! and has no other below it. It does not look at any file.

use std::collections::BTreeMap;

use bafs_proto::file_set::{FileSelection, MANIFEST_NAME, SELECTIONS_MAX};

use super::ast::{ExtractDeclaration, Word};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::glob_pattern::PathPattern;
use super::path::parse_relative;
use super::url::{Scheme, Url};

/// Where a target is declared, and as what.
#[derive(Debug, Clone, Copy)]
pub(super) struct TargetPlace {
    pub(super) location: SourceLocation,
    /// Whether a set of files goes below it.
    pub(super) is_directory: bool,
}

/// Reads what an extract sends: the path of one file, or the words and parts of a set.
pub(super) fn read_selections(
    declaration: &ExtractDeclaration,
    diagnostics: &mut Diagnostics,
) -> (String, Vec<FileSelection>) {
    let mut selections = Vec::new();
    for word in &declaration.paths {
        selections.extend(read_selection(word, diagnostics));
    }
    if declaration.is_directory {
        if let Some(word) = declaration.paths.get(SELECTIONS_MAX) {
            let message = format!("a set has at most {SELECTIONS_MAX} parts");
            let hint = "write patterns, or the directory of the files";
            diagnostics.error_hint(word.location, message, hint);
        }
        let words: Vec<String> = selections.iter().map(FileSelection::to_word).collect();
        return (words.join(" "), selections);
    }
    let first = &declaration.paths[0];
    let message = match selections.first() {
        _ if declaration.paths.len() > 1 => "several files cannot have one name".to_owned(),
        Some(FileSelection::Directory(_)) => format!("'{}' is a directory", first.text),
        Some(FileSelection::Pattern(_)) => format!("'{}' may be several files", first.text),
        Some(FileSelection::File(path)) => return (path.clone(), Vec::new()),
        None => return (String::new(), Vec::new()),
    };
    let hint = format!(
        "end the URL with '/': the files go below '{}/'",
        declaration.target
    );
    diagnostics.error_hint(first.location, message, hint);
    (String::new(), Vec::new())
}

/// One part; quotes keep wildcards as they are. Nothing if it is wrong.
fn read_selection(word: &Word, diagnostics: &mut Diagnostics) -> Option<FileSelection> {
    let selection = match (FileSelection::of_word(&word.text), word.quote) {
        (FileSelection::Pattern(path), Some(_)) => FileSelection::File(path),
        (selection, _) => selection,
    };
    let mut refuse = |message: String, hint: &str| {
        diagnostics.error_hint(word.location, message, hint);
        None
    };
    let path = match selection.path() {
        "" if matches!(selection, FileSelection::Directory(_)) => String::new(),
        text => match parse_relative(text) {
            Ok(path) => path,
            Err(error) => {
                let message = format!("the path '{}' {}", word.text, error.description());
                let hint = "write the file's path inside the volume, such as out/result.txt";
                return refuse(message, hint);
            }
        },
    };
    Some(match selection {
        FileSelection::File(_) if path == MANIFEST_NAME => {
            let message = format!("'{path}' is the name of manifests of sets");
            return refuse(message, "give the file another name");
        }
        FileSelection::File(_) => FileSelection::File(path),
        FileSelection::Directory(_) => FileSelection::Directory(path),
        FileSelection::Pattern(_) if word.text.ends_with('/') => {
            let message = format!("the pattern '{}' matches no files", word.text);
            return refuse(message, "write a pattern of files, such as out/*/*.txt");
        }
        FileSelection::Pattern(_) => match PathPattern::parse(&path) {
            Ok(_) => FileSelection::Pattern(path),
            Err(error) => {
                let message = format!("the pattern '{}' is wrong: {error}", word.text);
                return refuse(message, "put quotes around a name with '*', '?' or '['");
            }
        },
    })
}

/// Refuses a target that cannot be written, names no file, or was given before; notes others.
pub(super) fn check_target(
    target: &Url,
    place: TargetPlace,
    targets: &mut BTreeMap<Url, TargetPlace>,
    diagnostics: &mut Diagnostics,
) {
    let at = place.location;
    if !target.scheme.is_writable() {
        let message = format!("'{target}' cannot be written: the scheme is read-only");
        diagnostics.error_hint(at, message, "use bafs, ftp, file, s3 or sftp");
    } else if target.path == "/" {
        let message = format!("'{target}' names no file");
        let hint = match place.is_directory {
            true => "name a directory of its own for the files",
            false => "name the file that is to be made",
        };
        diagnostics.error_hint(at, message, hint);
    }
    if let Some(first) = targets.get(target) {
        let is_set = first.is_directory || place.is_directory;
        let first = diagnostics.describe_location(first.location);
        let message = format!("two files are extracted to '{target}', one in {first}");
        let hint = match is_set {
            true => "name all files in one 'extract', or give each set its own directory",
            false => "give each its own name",
        };
        diagnostics.error_hint(at, message, hint);
    } else {
        targets.insert(target.clone(), place);
    }
}

/// A file is no directory, but in a bucket, where names only look like paths. The directory of a
/// set has no other target in it.
pub(super) fn check_nested_targets(
    targets: &BTreeMap<Url, TargetPlace>,
    diagnostics: &mut Diagnostics,
) {
    for (target, place) in targets {
        let mut above = target.clone();
        while let Some(end) = above.path.rfind('/').filter(|end| *end > 0) {
            above.path.truncate(end);
            let Some(first) = targets.get(&above) else {
                continue;
            };
            if target.scheme == Scheme::S3 && !first.is_directory {
                continue;
            }
            let is_set = first.is_directory;
            let first = diagnostics.describe_location(first.location);
            let (what, hint) = match is_set {
                true => (
                    "the directory of a set",
                    "a set has its directory for itself: choose another one",
                ),
                false => (
                    "a file",
                    "no path is a file and a directory: give each a name of its own",
                ),
            };
            let message = format!("'{target}' is below '{above}', {what} as {first} says");
            diagnostics.error_hint(place.location, message, hint);
            break;
        }
    }
}
