//! Reads a workflow file and shows what is wrong with it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use bafs_workflow::{
    DESCRIPTION_BYTES_MAX, Diagnostic, FILE_BYTES_MAX, Workflow, WorkflowRejected, parse_workflow,
};

use crate::input_file;
use crate::output::Printer;
use crate::terminal_text;

/// Reads and checks a workflow; its warnings go to standard error.
pub(crate) fn load_workflow(path: &Path) -> Result<Workflow> {
    let text = input_file::read_text(path, FILE_BYTES_MAX).context("the workflow")?;
    let file = path.to_string_lossy();
    match parse_workflow(&file, &text, &read_description) {
        Ok(checked) => {
            for warning in &checked.warnings {
                eprintln!(
                    "{}",
                    terminal_text::sanitize_lines(&format_diagnostic(warning, &file, &text))
                );
            }
            Ok(checked.workflow)
        }
        Err(rejected) => {
            eprintln!(
                "{}",
                terminal_text::sanitize_lines(&format_rejection(&rejected, &file, &text))
            );
            bail!("{file} has errors; correct those listed above");
        }
    }
}

/// The same of one that is read for its names only: nothing is said of it.
pub(crate) fn load_without_warnings(path: &Path) -> Option<Workflow> {
    let text = input_file::read_text(path, FILE_BYTES_MAX).ok()?;
    let checked = parse_workflow(&path.to_string_lossy(), &text, &read_description);
    checked.ok().map(|checked| checked.workflow)
}

/// A job description file.
fn read_description(path: &str) -> Result<String, String> {
    let text = input_file::read_text(Path::new(path), DESCRIPTION_BYTES_MAX);
    text.map_err(|e| format!("{e:#}"))
}

/// All that is listed of what is wrong, and how much more there is.
fn format_rejection(rejected: &WorkflowRejected, file: &str, text: &str) -> String {
    let listed = rejected.diagnostics.iter();
    let listed = listed.map(|diagnostic| format_diagnostic(diagnostic, file, text));
    listed
        .chain(rejected.describe_omitted())
        .collect::<Vec<_>>()
        .join("\n")
}

/// A diagnostic with the line that it is about, which may be in a job description file.
fn format_diagnostic(diagnostic: &Diagnostic, file: &str, text: &str) -> String {
    if diagnostic.file == file {
        return diagnostic.with_source(text);
    }
    match read_description(&diagnostic.file) {
        Ok(other) => diagnostic.with_source(&other),
        Err(_) => diagnostic.to_string(),
    }
}

/// `bafs check`: says what a workflow consists of.
pub(crate) fn check_workflow(path: &Path, output: Printer) -> Result<()> {
    let workflow = load_workflow(path)?;
    let (jobs, volumes) = (workflow.jobs.len(), workflow.volumes.len());
    let extracts = workflow.extracts.len();
    output.print_result(
        &format!(
            "{}: {jobs} jobs, {volumes} volumes, {extracts} extracted files",
            workflow.name
        ),
        &serde_json::json!({ "jobs": jobs, "volumes": volumes, "extracts": extracts }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn omitted_errors_are_counted() {
        let told = |lines: usize| {
            let text = "nonsense here\n".repeat(lines);
            let rejected =
                parse_workflow("w.bafs", &text, &read_description).expect_err("nonsense");
            let omitted = rejected.errors_omitted;
            (format_rejection(&rejected, "w.bafs", &text), omitted)
        };
        let (few, none) = told(2);
        assert!(
            few.contains("nonsense here") && !few.contains("more error"),
            "{few}"
        );
        let (many, omitted) = told(1_000);
        let last = many.lines().last().expect("a line");
        assert_eq!(last, format!("and {omitted} more errors"));
        assert!(none == 0 && omitted > 500, "{none}, {omitted}");
    }
}
