//! How users of a service are called, and which homes their workflows may use. It knows no queue.

use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::{Scheme, Workflow};

/// Refuses what would be no name of a directory, or an option.
pub(super) fn check_user_name(name: &str) -> Result<()> {
    let is_right = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let is_name = !name.is_empty() && name.len() <= 64 && name.chars().all(is_right);
    match is_name && !name.starts_with(['.', '-']) {
        true => Ok(()),
        false => {
            let text = format!(
                "'{}' is no name of a user; use letters, digits, '-', '_' and '.'",
                name.escape_debug()
            );
            Err(Error::new(ErrorCode::Malformed, text))
        }
    }
}

/// A path of a home without slashes at its ends, and without steps up.
pub(super) fn clean_home(path: &str) -> Result<String> {
    let clean = path.trim_matches('/');
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    match clean.is_empty() || clean.split('/').all(is_plain) {
        true => Ok(clean.to_owned()),
        false => {
            let text = format!("'{path}' is no path of a home, such as projects/alice");
            Err(Error::new(ErrorCode::BadPath, text))
        }
    }
}

/// Whether the user may use all homes that a workflow names. Its runs hold no other rights either.
pub(super) fn check_home_rights(workflow: &Workflow, homes: &[String]) -> Result<()> {
    for url in workflow.urls().filter(|url| url.scheme == Scheme::Bafs) {
        let path = url.path.trim_matches('/');
        let is_below = |home: &String| {
            let rest = path.strip_prefix(home.as_str());
            home.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let has_steps_up = path.split('/').any(|part| part == "..");
        if has_steps_up || !homes.iter().any(is_below) {
            let text = format!("your workflows may not use {url}; ask the operator of the service");
            return Err(Error::new(ErrorCode::RightMissing, text));
        }
    }
    Ok(())
}
