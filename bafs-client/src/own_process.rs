//! How this program starts itself as another process, with a part of its own to play. Starts none.

/// The program itself, even if its file was replaced since it started.
pub(crate) const OWN_EXECUTABLE: &str = "/proc/self/exe";

/// The hidden first argument that makes the program a stage of a job.
pub(crate) const SUBCOMMAND: &str = "job-init";

// What the process is, as the second argument.
pub(crate) const OUTER: &str = "outer";
pub(crate) const PROBE: &str = "probe";
pub(crate) const HOLDER: &str = "holder";
pub(crate) const REMOVER: &str = "remover";
pub(crate) const MOUNT_WATCHDOG: &str = "mount-watchdog";
pub(crate) const PROBE_MOUNT: &str = "probe-mount";
pub(crate) const INNER: &str = "inner";
