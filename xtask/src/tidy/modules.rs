//! Every Rust file belongs to a program or library: what no `mod` names is compiled by nobody, and
//! its tests do not run. Knows only where modules are found by their names.

use std::collections::BTreeSet;

use super::files::SourceFile;
use super::source::{blank_non_code, find_word_starts};
use super::violation::RuleViolation;

/// Checks all Rust files, with the roots that `cargo metadata` knows.
pub(super) fn check_modules(
    files: &[SourceFile],
    metadata: &serde_json::Value,
) -> Vec<RuleViolation> {
    let roots = crate_roots(metadata);
    // Who names whom, as `directory/name`, where the file of the module is looked for.
    let mut named = BTreeSet::new();
    for file in files.iter().filter(|file| file.has_extension("rs")) {
        let directory = modules_directory(&file.path, &roots);
        for name in declared_modules(&blank_non_code(&file.text)) {
            named.insert(join_path(directory, &name));
        }
    }
    let forgotten = files.iter().filter(|file| {
        file.has_extension("rs")
            && !roots.contains(file.path.as_str())
            && !named.contains(module_path(&file.path))
    });
    forgotten
        .map(|file| {
            RuleViolation::new(
                &file.path,
                0,
                "no `mod` names this file: nobody compiles it, and its tests do not run",
            )
        })
        .collect()
}

/// The files that programs, libraries and tests begin with, as seen from the root of the checkout.
fn crate_roots(metadata: &serde_json::Value) -> BTreeSet<&str> {
    let checkout = metadata["workspace_root"].as_str().unwrap_or_default();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .flat_map(|package| package["targets"].as_array().into_iter().flatten())
        .filter_map(|target| target["src_path"].as_str()?.strip_prefix(checkout))
        .map(|path| path.trim_start_matches('/'))
        .collect()
}

/// Where the modules that a file names are: beside a root or a `mod.rs`, else below the file.
fn modules_directory<'a>(path: &'a str, crate_roots: &BTreeSet<&str>) -> &'a str {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    if crate_roots.contains(path) || name == "mod.rs" {
        return directory;
    }
    module_path(path)
}

/// A file's place without what the file system adds: `a/b.rs` and `a/b/mod.rs` are both `a/b`.
fn module_path(path: &str) -> &str {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    path.strip_suffix("/mod").unwrap_or(path)
}

fn join_path(directory: &str, name: &str) -> String {
    format!("{directory}/{name}")
}

/// The modules that the code says are in files of their own.
fn declared_modules(code: &str) -> Vec<String> {
    let lines = code.lines().flat_map(|line| {
        let starts = find_word_starts(line, "mod").into_iter();
        starts.map(move |start| line[start + "mod".len()..].trim_start())
    });
    lines
        .filter_map(|rest| rest.split_once(';'))
        .map(|(name, _)| name.trim().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check_files(files: &[(&str, &str)]) -> Vec<String> {
        let metadata = json!({"workspace_root": "/checkout", "packages": [{"targets": [
            {"src_path": "/checkout/a/src/lib.rs"}, {"src_path": "/checkout/a/tests/all.rs"},
        ]}]});
        let files: Vec<SourceFile> = files
            .iter()
            .map(|&(path, text)| SourceFile {
                path: path.to_owned(),
                text: text.to_owned(),
            })
            .collect();
        let found = check_modules(&files, &metadata);
        found.into_iter().map(|finding| finding.path).collect()
    }

    #[test]
    fn test_file_without_a_mod_is_found() {
        let all = ("a/tests/all.rs", "mod named;\nmod parts;\n// mod spoken;");
        let files = [
            all,
            ("a/tests/named.rs", ""),
            ("a/tests/parts/mod.rs", "mod one;"),
            ("a/tests/parts/one.rs", ""),
            ("a/tests/parts/two.rs", ""),
            ("a/tests/spoken.rs", ""),
        ];
        assert_eq!(
            check_files(&files),
            ["a/tests/parts/two.rs", "a/tests/spoken.rs"]
        );
    }

    #[test]
    fn modules_lie_below_their_declaring_file() {
        let files = [
            ("a/src/lib.rs", "pub(crate) mod b;\nmod inline { }"),
            ("a/src/b.rs", "#[cfg(test)] mod c;"),
            ("a/src/b/c.rs", ""),
            ("a/src/c.rs", ""),
            ("a/src/inline.rs", ""),
        ];
        assert_eq!(check_files(&files), ["a/src/c.rs", "a/src/inline.rs"]);
    }
}
