//! Reads a workflow file with all that it names, and shows what is wrong with it.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bafs_workflow::{
    CheckedWorkflow, DESCRIPTION_BYTES_MAX, Diagnostic, FILE_BYTES_MAX, ListedEntry, LocatedFile,
    Severity, Sources, Url, Workflow, WorkflowRejected, parse_workflow_with,
};
use serde_json::{Value, json};

use crate::args::CheckArgs;
use crate::finding::Finding;
use crate::home_view::{HomeView, list_local};
use crate::input_file;
use crate::output::Printer;
use crate::terminal_text;
use crate::workflow_findings::{JobMachine, find_faults};

/// What a workflow names: files of this machine, and listings of homes.
struct WorkflowSources<'h> {
    homes: &'h HomeView,
}

impl Sources for WorkflowSources<'_> {
    fn read(&self, path: &str, bytes_max: usize) -> Result<String, String> {
        let text = input_file::read_text(Path::new(path), bytes_max);
        text.map_err(|error| format!("{error:#}"))
    }

    fn list(
        &self,
        directory: &str,
        depth_max: usize,
        enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        if !directory.contains("://") {
            return list_local(&Path::new(".").join(directory), depth_max, enters);
        }
        let url: Url = directory.parse().map_err(|error| format!("{error}"))?;
        self.homes.list(&url, depth_max, enters)
    }

    fn locate(&self, path: &str) -> Result<LocatedFile, String> {
        self.homes.locate(&Path::new(".").join(path))
    }
}

/// Reads and checks a workflow; its warnings go to standard error.
pub(crate) fn load_workflow(path: &Path, homes: &HomeView) -> Result<Workflow> {
    Ok(load_checked(path, homes)?.workflow)
}

/// The same with what the check found out.
pub(crate) fn load_checked(path: &Path, homes: &HomeView) -> Result<CheckedWorkflow> {
    let (file, text, parsed) = parse_file(path, homes)?;
    match parsed {
        Ok(checked) => {
            print_diagnostics(&checked.warnings, &file, &text);
            Ok(checked)
        }
        Err(rejected) => {
            print_lines(&format_rejection(&rejected, &file, &text));
            bail!("{file} has errors; correct those listed above");
        }
    }
}

/// The same of one that is read for its names only: nothing is said of it.
pub(crate) fn load_without_warnings(path: &Path) -> Option<Workflow> {
    let (_, _, parsed) = parse_file(path, &HomeView::from_environment(path)).ok()?;
    parsed.ok().map(|checked| checked.workflow)
}

/// Name, text and meaning of a workflow file.
type ParsedFile = (String, String, Result<CheckedWorkflow, WorkflowRejected>);

fn parse_file(path: &Path, homes: &HomeView) -> Result<ParsedFile> {
    let text = input_file::read_text(path, FILE_BYTES_MAX).context("the workflow")?;
    let file = path.to_string_lossy().into_owned();
    let parsed = parse_workflow_with(&file, &text, &WorkflowSources { homes });
    Ok((file, text, parsed))
}

fn print_diagnostics(diagnostics: &[Diagnostic], file: &str, text: &str) {
    for diagnostic in diagnostics {
        print_lines(&format_diagnostic(diagnostic, file, text));
    }
}

fn print_lines(text: &str) {
    eprintln!("{}", terminal_text::sanitize_lines(text));
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
    let other = input_file::read_text(Path::new(&diagnostic.file), DESCRIPTION_BYTES_MAX);
    match other {
        Ok(other) => diagnostic.with_source(&other),
        Err(_) => diagnostic.to_string(),
    }
}

/// `bafs check`: says what is wrong with a workflow and what it names, and of what it consists.
pub(crate) fn check_workflow(args: &CheckArgs, output: Printer) -> Result<ExitCode> {
    let path = &args.workflow;
    let cluster = args.identity.as_ref().zip(args.catalog.as_ref());
    let export = args.export.as_ref().map(|export| export.to_owned());
    let (homes, machine) = match (args.local || export.is_some(), cluster) {
        (true, _) => (
            export.map_or_else(|| HomeView::beside(path), HomeView::Directory),
            JobMachine::This,
        ),
        (false, Some((identity, catalog))) => (
            HomeView::of_cluster(identity, catalog, path)?,
            JobMachine::Nodes,
        ),
        (false, None) => (HomeView::without_homes(path), JobMachine::Unknown),
    };
    let (file, text, parsed) = match parse_file(path, &homes) {
        Ok(read) => read,
        Err(error) if output.is_json() => {
            output.print_result("", &describe_unreadable(path, &error))?;
            return Ok(ExitCode::FAILURE);
        }
        Err(error) => return Err(error),
    };
    let checked = match parsed {
        Ok(checked) => checked,
        Err(rejected) => {
            if !output.is_json() {
                print_lines(&format_rejection(&rejected, &file, &text));
                bail!("{file} has errors; correct those listed above");
            }
            let result = json!({
                "diagnostics": diagnostics_json(&rejected.diagnostics),
                "errors_omitted": rejected.errors_omitted,
                "findings": [],
            });
            output.print_result("", &result)?;
            return Ok(ExitCode::FAILURE);
        }
    };
    if !output.is_json() {
        print_diagnostics(&checked.warnings, &file, &text);
    }
    let findings = find_faults(&checked, &homes, machine);
    report_check(&checked, &findings, output)?;
    Ok(match findings.iter().any(|finding| finding.is_error) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// A file that cannot be read, as programs read what is wrong with one.
fn describe_unreadable(path: &Path, error: &anyhow::Error) -> Value {
    let diagnostic = Diagnostic {
        file: path.to_string_lossy().into_owned(),
        line: 1,
        column: 1,
        severity: Severity::Error,
        message: format!("{error:#}"),
        hint: None,
    };
    json!({
        "diagnostics": diagnostics_json(&[diagnostic]),
        "errors_omitted": 0,
        "findings": [],
    })
}

fn report_check(checked: &CheckedWorkflow, findings: &[Finding], output: Printer) -> Result<()> {
    if !output.is_json() {
        for finding in findings {
            print_lines(&finding.describe());
        }
    }
    let workflow = &checked.workflow;
    let (jobs, volumes) = (workflow.jobs.len(), workflow.volumes.len());
    let extracts = workflow.extracts.len();
    output.print_result(
        &format!(
            "{}: {jobs} jobs, {volumes} volumes, {extracts} extracted files",
            workflow.name
        ),
        &json!({
            "jobs": jobs,
            "volumes": volumes,
            "extracts": extracts,
            "diagnostics": diagnostics_json(&checked.warnings),
            "errors_omitted": 0,
            "findings": findings,
        }),
    )
}

/// Diagnostics as programs read them.
fn diagnostics_json(diagnostics: &[Diagnostic]) -> Vec<Value> {
    let one = |diagnostic: &Diagnostic| {
        json!({
            "file": diagnostic.file,
            "line": diagnostic.line,
            "column": diagnostic.column,
            "severity": diagnostic.severity.to_string(),
            "message": diagnostic.message,
            "hint": diagnostic.hint,
        })
    };
    diagnostics.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn unreadable_file_is_a_diagnostic() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"job a {\n\xff\n}\n").expect("write");
        let homes = HomeView::beside(file.path());
        let error = parse_file(file.path(), &homes).expect_err("no text");
        let told = describe_unreadable(file.path(), &error);
        let diagnostic = &told["diagnostics"][0];
        let message = diagnostic["message"].as_str().expect("a text");
        assert!(message.contains("line 2 is not text in UTF-8"), "{told}");
        assert_eq!(diagnostic["severity"], "error");
    }

    #[test]
    fn plain_check_looks_beside_the_workflow() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("w.bafs");
        std::fs::write(directory.path().join("tool.sh"), "#!/bin/sh\n").expect("write");
        let text = "volume v cache bafs://home/none 1 MB\nmount v a /v\n\
                    program tool from tool.sh\njob a {\nexecutable = tool\n}\n\
                    job b {\nexecutable = no-such-program-9\n}\n";
        std::fs::write(&path, text).expect("write");
        let homes = HomeView::without_homes(&path);
        let (_, _, parsed) = parse_file(&path, &homes).expect("a text");
        let checked = parsed.expect("it is right");
        let found = find_faults(&checked, &homes, JobMachine::Unknown);
        let told: Vec<String> = found.iter().map(Finding::describe).collect();
        let starts = [
            "error: 1 program has no permission to run\n  tool (job a)\n",
            "warning: 1 program is not on this machine\n  no-such-program-9 (job b)\n",
            "note: 1 place was not looked at\n  bafs://home\n",
        ];
        assert_eq!(told.len(), starts.len(), "{told:?}");
        for (told, start) in told.iter().zip(starts) {
            assert!(told.starts_with(start), "{told}");
        }
    }

    #[test]
    fn omitted_errors_are_counted() {
        let told = |lines: usize| {
            let text = "nonsense here\n".repeat(lines);
            let rejected =
                parse_workflow("w.bafs", &text, &|_| unreachable!()).expect_err("nonsense");
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
