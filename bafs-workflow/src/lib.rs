//! The workflow language: text in, a checked [`Workflow`] or a list of errors out.
//!
//! ```text
//! text --lex, parse--> nodes --expand, declare--> declarations --check--> Workflow
//! ```
//!
//! 1. `lex.rs` splits lines into words as a POSIX shell does. `parse.rs` makes statements, inline
//!    job bodies and loops of them. After an error it goes on with the next statement.
//! 2. `expand.rs` runs the loops and includes. `lists.rs` reads what loops go through, and
//!    `scope.rs` replaces variables. `declarations.rs` turns each statement into a declaration:
//!    names, sizes, URLs. `templates.rs` and `job_description.rs` read the descriptions of jobs.
//! 3. `check.rs` resolves names, and rejects what does not fit together: a cycle, two writers of a
//!    volume without an order, a volume that is read before it is written.
//!
//! [`parse_workflow_with`] runs all stages. Its caller passes the [`Sources`] that read files and
//! list directories, so the result follows from the arguments alone.
//!
//! [`Workflow`] (`model.rs`) has indices instead of names: [`JobIndex`] and [`VolumeIndex`] count
//! from 0 in the order of the text. The planner, the scheduler and the journal use it, and it is
//! never changed.
//!
//! **Units.** Sizes are bytes and numbers of files, times seconds, and all of them are exact
//! integers.
//!
//! **Errors.** [`WorkflowRejected`] has up to 20 errors for the user, each a [`Diagnostic`] with
//! its place and a hint. Warnings come with a workflow that may run ([`CheckedWorkflow`]).
//!
//! **Limits.** `limits.rs` has them all: a text of 512 MiB, ten million statements, twenty million
//! edges. Bounds that nodes and agents have are checked here too (`bounds.rs`), so no job meets one
//! only when it starts.
//!
//! There is no state and no concurrency. Nothing here plans, places or runs a job.
//! `docs/reference/workflow.md` is the reference of the language.

mod access;
mod ast;
mod bounds;
mod check;
mod command;
mod declarations;
mod diagnostic;
mod expand;
mod format;
mod glob_pattern;
mod includes;
mod job_description;
mod job_order;
mod keywords;
mod lex;
mod limits;
mod lists;
mod load;
mod model;
mod name_functions;
mod names;
mod overlaps;
mod parse;
mod path;
mod pipelines;
mod programs;
mod quantities;
mod reference;
mod scope;
mod script;
mod sources;
mod spelling;
mod targets;
mod templates;
mod url;
mod word_cursor;

pub use diagnostic::{Diagnostic, Severity, WorkflowRejected};
pub use format::format_workflow;
pub use job_order::{OrderSearch, SearchTooLong};
pub use limits::{DESCRIPTION_BYTES_MAX, EDGES_MAX, FILE_BYTES_MAX, FILES_MAX, RUNTIME_S_MAX};
pub use load::{CheckedWorkflow, parse_workflow, parse_workflow_with};
pub use model::topological_sort;
pub use model::{
    CachePolicy, Extract, FirstUsers, Job, JobIndex, JobLimits, Mount, ProgramSpec,
    SHARED_DIRECTORIES, Volume, VolumeIndex, VolumeKind, Workflow,
};
pub use overlaps::{
    ExtractTarget, HomePathKey, Overlap, find_overlaps, overlap_hint, split_parts, textual_key,
};
pub use quantities::{
    QuantityError, parse_duration, parse_duration_with_unit, parse_rate, parse_size,
};
pub use sources::{ListedEntry, LocatedFile, Sources};
pub use spelling::find_nearest;
pub use url::{Scheme, Url, UrlError};
