//! Fixtures of scheduler tests: a workflow as text, and a successful job.

use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::{Workflow, parse_workflow};

use super::report;

/// A workflow without job description files.
///
/// # Panics
/// When the text is invalid, with its errors.
pub fn parse_workflow_text(text: &str) -> Workflow {
    let none = |path: &str| Err(format!("no file {path}"));
    match parse_workflow("w.bafs", text, &none) {
        Ok(checked) => checked.workflow,
        Err(rejected) => panic!("{rejected}\n{text}"),
    }
}

/// The report of a job that exited with 0 and reports no volumes.
pub fn successful_report() -> JobReport {
    report(JobOutcome::Exited(0))
}
