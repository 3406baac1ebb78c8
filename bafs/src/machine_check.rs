//! Whether this machine can run jobs, before any is started.

use anyhow::{Result, bail};
use bafs_client::sandbox::CheckStatus;

/// Whether this machine can run jobs; a cluster on it would only find out later.
pub(crate) fn check_machine() -> Result<()> {
    let missing: Vec<String> = bafs_client::sandbox::check_host()
        .into_iter()
        .filter(|check| check.status == CheckStatus::Missing)
        .map(|check| {
            format!(
                "{}: {}; to do: {}",
                check.subject, check.found, check.remedy
            )
        })
        .collect();
    if !missing.is_empty() {
        bail!("this machine cannot run jobs:\n  {}", missing.join("\n  "));
    }
    Ok(())
}
