//! Where extracts go: each target is writable, names one file of its own, and has no other below
//! it. It does not look at what is extracted.

use std::collections::BTreeMap;

use super::diagnostic::{Diagnostics, SourceLocation};
use super::url::{Scheme, Url};

/// Refuses a target that cannot be written, names no file, or was given before; notes others.
pub(super) fn check_target(
    target: &Url,
    at: SourceLocation,
    targets: &mut BTreeMap<Url, SourceLocation>,
    diagnostics: &mut Diagnostics,
) {
    if !target.scheme.is_writable() {
        let message = format!("'{target}' cannot be written: the scheme is read-only");
        diagnostics.error_hint(at, message, "use bafs, ftp, file, s3 or sftp");
    } else if target.path == "/" {
        let message = format!("'{target}' names no file");
        diagnostics.error_hint(at, message, "name the file that is to be made");
    }
    if let Some(first) = targets.get(target) {
        let first = diagnostics.describe_location(*first);
        let message = format!("two files are extracted to '{target}', one in {first}");
        diagnostics.error_hint(at, message, "give each its own name");
    } else {
        targets.insert(target.clone(), at);
    }
}

/// A file is no directory, but in a bucket, where names only look like paths.
pub(super) fn check_nested_targets(
    targets: &BTreeMap<Url, SourceLocation>,
    diagnostics: &mut Diagnostics,
) {
    for (target, at) in targets.iter().filter(|(it, _)| it.scheme != Scheme::S3) {
        let mut above = target.clone();
        while let Some(end) = above.path.rfind('/').filter(|end| *end > 0) {
            above.path.truncate(end);
            let Some(first) = targets.get(&above) else {
                continue;
            };
            let first = diagnostics.describe_location(*first);
            let message = format!("'{target}' is below '{above}', a file as {first} says");
            let hint = "no path is a file and a directory: give each a name of its own";
            diagnostics.error_hint(*at, message, hint);
            break;
        }
    }
}
