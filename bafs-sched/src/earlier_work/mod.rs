//! What earlier runs of a workflow did, and which of its jobs must run again because of what
//! changed since: as make, Snakemake and Nextflow do. Plain data in and out; looks at no home and
//! at no journal.
//!
//! [`JobRecord`] is what is known of a finished job: the digest of its description, what it read,
//! who produced the rest, and its results. [`find_changes`] compares records with the workflow and
//! with what homes have now. [`decide_jobs`] follows that through the graph, forward to the readers
//! of what changes, and backward to the writers of what is gone.

mod comparison;
mod description;
mod propagation;
mod reason;
mod record;

pub use comparison::{
    FoundResult, HomeState, ListedPath, SourceListing, SourceState, find_changes, source_of,
};
pub use description::{ExtractIndex, describe_job_digest, written_volumes};
pub use propagation::{JobDecisions, decide_jobs};
pub use reason::{RunReason, summarise};
pub use record::{
    AdoptedVolume, EarlierWork, JobRecord, KeptVolume, NamedFiles, ProgramIdentity, ResultRecord,
    SeenSource, SourceRecord,
};
