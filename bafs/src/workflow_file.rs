//! Reads a workflow file and shows what is wrong with it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use bafs_sched::workflow::{Diagnostic, Workflow, parse_workflow};

use crate::output::Output;

/// Reads and checks a workflow; its warnings go to standard error.
pub(crate) fn load(path: &Path) -> Result<Workflow> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the workflow {}", path.display()))?;
    let file = path.to_string_lossy();
    let read = |path: &str| std::fs::read_to_string(path).map_err(|e| e.to_string());
    match parse_workflow(&file, &text, &read) {
        Ok(checked) => {
            for warning in &checked.warnings {
                eprintln!("{}", explain(warning, &file, &text));
            }
            Ok(checked.workflow)
        }
        Err(rejected) => {
            for diagnostic in &rejected.diagnostics {
                eprintln!("{}", explain(diagnostic, &file, &text));
            }
            bail!("{file} has errors: correct what is named above");
        }
    }
}

/// A diagnostic with the line that it is about, which may be in a job description file.
fn explain(diagnostic: &Diagnostic, file: &str, text: &str) -> String {
    if diagnostic.file == file {
        return diagnostic.with_source(text);
    }
    match std::fs::read_to_string(&diagnostic.file) {
        Ok(other) => diagnostic.with_source(&other),
        Err(_) => diagnostic.to_string(),
    }
}

/// `bafs check`: says what a workflow consists of.
pub(crate) fn check(path: &Path, output: Output) -> Result<()> {
    let workflow = load(path)?;
    let (jobs, volumes) = (workflow.jobs.len(), workflow.volumes.len());
    let extracts = workflow.extracts.len();
    output.say(
        &format!(
            "{}: {jobs} jobs, {volumes} volumes, {extracts} extracted files",
            workflow.name
        ),
        &serde_json::json!({ "jobs": jobs, "volumes": volumes, "extracts": extracts }),
    )
}
