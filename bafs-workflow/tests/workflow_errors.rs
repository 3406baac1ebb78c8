//! Data-driven tests of what the workflow language says: `tests/workflow/*.txt` hold cases of
//! input, `----` and the expected diagnostics. `BAFS_BLESS=1` writes what is said now.
//!
//! A case begins with `==== title`; a line `-- NAME` in its input begins another file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use bafs_workflow::{Diagnostic, ListedEntry, Severity, Sources, parse_workflow_with};

struct DiagnosticCase<'t> {
    title: &'t str,
    input: String,
    expected: String,
}

fn read_cases(text: &str) -> Vec<DiagnosticCase<'_>> {
    let mut cases: Vec<DiagnosticCase> = Vec::new();
    let mut in_expected = false;
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("==== ") {
            cases.push(DiagnosticCase {
                title,
                input: String::new(),
                expected: String::new(),
            });
            in_expected = false;
            continue;
        }
        let case = cases
            .last_mut()
            .expect("a file begins with ==== and a title");
        match line {
            "----" if !in_expected => in_expected = true,
            "" if in_expected => {}
            _ if in_expected => case.expected += &format!("{line}\n"),
            _ => case.input += &format!("{line}\n"),
        }
    }
    cases
}

/// The files that a case carries, by name.
struct CaseFiles<'t>(BTreeMap<&'t str, &'t str>);

impl Sources for CaseFiles<'_> {
    fn read(&self, path: &str, _bytes_max: usize) -> Result<String, String> {
        let text = self.0.get(path).map(|text| (*text).to_owned());
        text.ok_or_else(|| "no such file".to_owned())
    }

    fn list(
        &self,
        directory: &str,
        _depth_max: usize,
        _enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        let below = self
            .0
            .keys()
            .filter_map(|name| name.strip_prefix(directory));
        let entries: Vec<_> = below
            .map(|path| ListedEntry {
                path: path.to_owned(),
                is_directory: false,
            })
            .collect();
        match entries.is_empty() {
            true => Err("no such directory".to_owned()),
            false => Ok(entries),
        }
    }
}

/// Everything that is said about a case, with all files that the case carries.
fn describe_diagnostics(input: &str) -> String {
    let mut parts = input.split("\n-- ");
    let workflow = format!("{}\n", parts.next().unwrap_or_default().trim_end());
    let files: BTreeMap<&str, &str> = parts.filter_map(|part| part.split_once('\n')).collect();
    let parsed = parse_workflow_with("t.bafs", &workflow, &CaseFiles(files));
    let (diagnostics, end) = match parsed {
        Ok(checked) => (checked.warnings, "ok\n".to_owned()),
        Err(rejected) => {
            assert!(
                rejected
                    .diagnostics
                    .iter()
                    .any(|d| d.severity == Severity::Error)
            );
            let omitted = rejected.errors_omitted;
            let more = if omitted > 0 {
                format!("and {omitted} more\n")
            } else {
                String::new()
            };
            (rejected.diagnostics, more)
        }
    };
    let lines: String = diagnostics
        .iter()
        .map(|d: &Diagnostic| format!("{d}\n"))
        .collect();
    format!("{lines}{end}")
}

#[test]
fn diagnostics_match_the_recorded_cases() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/workflow");
    let mut paths: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    let bless = std::env::var_os("BAFS_BLESS").is_some();
    let mut total = 0;
    let mut wrong = String::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        let mut blessed = String::new();
        for case in read_cases(&text) {
            total += 1;
            let said = describe_diagnostics(&case.input);
            let DiagnosticCase {
                title,
                input,
                expected,
            } = case;
            if said != expected {
                let file = path.display();
                writeln!(wrong, "{file}: {title}\nexpected:\n{expected}said:\n{said}").unwrap();
            }
            let gap = if blessed.is_empty() { "" } else { "\n" };
            write!(blessed, "{gap}==== {title}\n{input}----\n{said}").unwrap();
        }
        if bless {
            std::fs::write(&path, blessed).unwrap();
        }
    }
    assert!(total >= 80, "only {total} cases: are files missing?");
    assert!(
        bless || wrong.is_empty(),
        "{wrong}BAFS_BLESS=1 accepts what is said now"
    );
}
