//! The way from a workflow's text to a checked workflow, stage after stage. The stages are in the
//! files beside this one.

use super::check::check_workflow;
use super::declarations::DeclarationBuilder;
use super::diagnostic::{Diagnostic, Diagnostics, SourceLocation, WorkflowRejected};
use super::expand::expand_text;
use super::limits::FILE_BYTES_MAX;
use super::model::{JobIndex, Workflow};
use super::sources::{DescriptionSource, Sources};

/// A workflow that may run, and what its author should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedWorkflow {
    /// The workflow.
    pub workflow: Workflow,
    /// Warnings ordered by place; never errors.
    pub warnings: Vec<Diagnostic>,
    /// Interpreters of scripts that a shell starts: no executable names them.
    pub interpreters: Vec<(JobIndex, String)>,
}

/// Parses and checks a workflow.
///
/// `file` is the path of the workflow file: it names diagnostics and the workflow. `read` returns
/// the text of a job description file, or why it cannot; it is given the path as the workflow
/// writes it, with the directory of `file` in front unless it is absolute, and at most once for
/// each path. Included files are read by it, too, and a glob is an error. Nothing else leaves this
/// function: the same arguments give the same result.
pub fn parse_workflow(
    file: &str,
    text: &str,
    read: &dyn Fn(&str) -> Result<String, String>,
) -> Result<CheckedWorkflow, WorkflowRejected> {
    parse_workflow_with(file, text, &DescriptionSource(read))
}

/// The same of a workflow that may have lists and includes, which `sources` reads: at most once for
/// each path.
pub fn parse_workflow_with(
    file: &str,
    text: &str,
    sources: &dyn Sources,
) -> Result<CheckedWorkflow, WorkflowRejected> {
    let mut diagnostics = Diagnostics::new(file);
    let mut declarer = DeclarationBuilder::new(file, sources);
    if text.len() > FILE_BYTES_MAX {
        let message = format!("the file is larger than {} MiB", FILE_BYTES_MAX >> 20);
        let hint = "use loops, or split the workflow into several";
        diagnostics.error_hint(SourceLocation::START, message, hint);
    } else {
        expand_text(file, text, &mut declarer, &mut diagnostics);
    }
    let name = workflow_name(file);
    let (workflow, interpreters) = check_workflow(name, declarer.declarations, &mut diagnostics);
    let warnings = diagnostics.finish()?;
    Ok(CheckedWorkflow {
        workflow,
        warnings,
        interpreters,
    })
}

/// The name of a file without directory and ending.
fn workflow_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    match name.rsplit_once('.') {
        Some((stem, _)) if !stem.is_empty() => stem.to_owned(),
        _ => name.to_owned(),
    }
}
