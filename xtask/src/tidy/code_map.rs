//! The code map of ARCHITECTURE.md and the code name the same modules.
//!
//! The map is the section whose heading holds "Code map". A heading that names a crate's directory
//! (`bafs-proto`), or a line that starts with it, makes it the current one; words that end in `.rs`
//! or `/` name files and directories, seen from the root or from the current crate's `src/`; a name
//! alone in back quotes counts as a module too. A tree, a table and a list are equally good maps.

use std::collections::BTreeSet;

use super::files::SourceFile;
use super::violation::RuleViolation;

const DOCUMENT: &str = "ARCHITECTURE.md";

/// Checks both directions: what the map names exists, and what exists is named.
pub(super) fn check_code_map(files: &[SourceFile]) -> Vec<RuleViolation> {
    let Some(document) = files.iter().find(|file| file.path == DOCUMENT) else {
        return Vec::new();
    };
    let Some((first_line, section)) = find_section(&document.text) else {
        return vec![RuleViolation::new(DOCUMENT, 0, "no section `Code map`")];
    };
    let crates = crate_directories(files);
    let mut findings = Vec::new();
    let mut named = BTreeSet::new();
    let mut current = None;
    for (index, line) in section.lines().enumerate() {
        let heading = line.starts_with('#');
        for (position, word) in path_words(line).into_iter().enumerate() {
            // Deeper in a line, a crate's name is part of what is said about something else.
            if let Some(found) = crate_of(word, &crates).filter(|_| heading || position == 0) {
                current = Some(found);
            }
            match look_up_module(word, current, files) {
                ModuleLookup::Module(path) => {
                    named.insert(path);
                }
                ModuleLookup::Missing => {
                    let what = format!("the code map names `{word}`, which does not exist");
                    findings.push(RuleViolation::new(DOCUMENT, first_line + index, what));
                }
                ModuleLookup::NotAName => {}
            }
        }
    }
    let modules = list_modules(files, &crates);
    let forgotten = modules.iter().filter(|module| !is_listed(module, &named));
    findings.extend(forgotten.map(|module| {
        RuleViolation::new(
            DOCUMENT,
            0,
            format!("the code map does not name the module `{module}`"),
        )
    }));
    findings
}

/// The section and the number of its first line.
fn find_section(text: &str) -> Option<(usize, &str)> {
    let is_heading = |line: &str| line.starts_with('#');
    let level = |line: &str| line.chars().take_while(|&c| c == '#').count();
    let mut offset = 0;
    let mut found: Option<(usize, usize, usize)> = None;
    let mut in_fence = false;
    for (index, line) in text.split_inclusive('\n').enumerate() {
        in_fence ^= line.trim_start().starts_with("```");
        if is_heading(line) && !in_fence {
            if let Some((start_line, start, depth)) = found {
                if level(line) <= depth {
                    return Some((start_line, &text[start..offset]));
                }
            } else if line.to_lowercase().contains("code map") {
                found = Some((index + 2, offset + line.len(), level(line)));
            }
        }
        offset += line.len();
    }
    found.map(|(start_line, start, _)| (start_line, &text[start..]))
}

/// Directories at the root that hold a crate with sources.
fn crate_directories(files: &[SourceFile]) -> BTreeSet<&str> {
    let manifests = files
        .iter()
        .filter_map(|file| file.path.strip_suffix("/Cargo.toml"));
    manifests
        .filter(|directory| !directory.contains('/'))
        .collect()
}

/// Words with the marks of a path; the `│├└─` of a tree and Markdown's own marks separate them.
fn path_words(line: &str) -> Vec<&str> {
    let belongs = |c: char| c.is_alphanumeric() || "_-./`*".contains(c);
    let words = line.split(|c| !belongs(c)).filter(|word| !word.is_empty());
    words
        .filter(|word| !word.trim_matches('`').contains('*'))
        .collect()
}

fn crate_of<'a>(word: &str, crates: &BTreeSet<&'a str>) -> Option<&'a str> {
    // `tests` and `bafs` are ordinary words too: they count when written as a directory or as code.
    let as_name = word.contains(['/', '-', '`']);
    let first = word.trim_matches('`').split('/').next()?;
    crates.get(first).copied().filter(|_| as_name)
}

enum ModuleLookup {
    /// A file or directory of the project, seen from the root.
    Module(String),
    Missing,
    /// An ordinary word.
    NotAName,
}

fn look_up_module(word: &str, current: Option<&str>, files: &[SourceFile]) -> ModuleLookup {
    let quoted = word.len() > 2 && word.starts_with('`') && word.ends_with('`');
    let name = word.trim_matches('`').trim_end_matches('.');
    let looks_like_path = name.ends_with(".rs") || name.ends_with('/') && name.len() > 1;
    let bare = quoted && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    if !looks_like_path && !bare {
        return ModuleLookup::NotAName;
    }
    let mut candidates = vec![name.to_owned()];
    if let Some(current) = current {
        let forms = if bare {
            vec![format!("{name}.rs"), format!("{name}/")]
        } else {
            vec![name.into()]
        };
        candidates.extend(forms.iter().map(|form| format!("{current}/src/{form}")));
        candidates.extend(forms.iter().map(|form| format!("{current}/{form}")));
    }
    let found = candidates.into_iter().find(|path| exists(path, files));
    match found {
        Some(path) => ModuleLookup::Module(path),
        None if bare => ModuleLookup::NotAName,
        None => ModuleLookup::Missing,
    }
}

fn exists(path: &str, files: &[SourceFile]) -> bool {
    files
        .iter()
        .any(|file| file.path == path || path.ends_with('/') && file.path.starts_with(path))
}

/// Top-level modules of every crate: files and directories in `src/`, but for its roots.
fn list_modules(files: &[SourceFile], crates: &BTreeSet<&str>) -> BTreeSet<String> {
    let mut modules = BTreeSet::new();
    for file in files.iter().filter(|file| file.has_extension("rs")) {
        let Some((directory, rest)) = file.path.split_once("/src/") else {
            continue;
        };
        if !crates.contains(directory) || ["lib.rs", "main.rs"].contains(&rest) {
            continue;
        }
        match rest.split_once('/') {
            // Programs of their own are no modules.
            Some(("bin", _)) => {}
            Some((module, _)) => {
                modules.insert(format!("{directory}/src/{module}/"));
            }
            None => {
                modules.insert(file.path.clone());
            }
        }
    }
    modules
}

/// Whether the map names the module, something in it, or the file or directory of the same name.
fn is_listed(module: &str, named: &BTreeSet<String>) -> bool {
    let stem = module.trim_end_matches('/').trim_end_matches(".rs");
    let directory = format!("{stem}/");
    let file = format!("{stem}.rs");
    named
        .iter()
        .any(|path| *path == file || path.starts_with(&directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "# A\n## Code map\n```\nbafs-proto/src/   what is said\n\
                        codec.rs   bytes\nnet/quic.rs   wire\n```\n## Next\nnot-here.rs\n";

    fn check_map(text: &str) -> Vec<String> {
        let paths = [
            "bafs-proto/Cargo.toml",
            "bafs-proto/src/lib.rs",
            "bafs-proto/src/codec.rs",
            "bafs-proto/src/net/mod.rs",
            "bafs-proto/src/net/quic.rs",
            "docs/contributing/style.md",
        ];
        let mut files: Vec<SourceFile> = paths
            .iter()
            .map(|&path| SourceFile {
                path: path.to_owned(),
                text: String::new(),
            })
            .collect();
        files.push(SourceFile {
            path: DOCUMENT.to_owned(),
            text: text.to_owned(),
        });
        check_code_map(&files)
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn trees_tables_and_lists_are_maps() {
        assert!(check_map(TREE).is_empty(), "{:?}", check_map(TREE));
        let table = "## The code map\n### `bafs-proto`\n| `codec` | bytes |\n| `net` | wires |\n";
        assert!(check_map(table).is_empty(), "{:?}", check_map(table));
        let list =
            "## Code map\n- `bafs-proto/src/codec.rs`: bytes.\n- `bafs-proto/src/net/`: wire\n";
        assert!(check_map(list).is_empty(), "{:?}", check_map(list));
    }

    #[test]
    fn unnamed_module_is_found() {
        let found = check_map(&TREE.replace("codec.rs", "(nothing)"));
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("bafs-proto/src/codec.rs"), "{found:?}");
    }

    #[test]
    fn name_without_module_is_found_with_its_line() {
        let found = check_map(&TREE.replace("codec.rs", "codec.rs gone.rs"));
        let what = "the code map names `gone.rs`, which does not exist";
        assert_eq!(found, [format!("ARCHITECTURE.md:5: {what}")]);
    }

    #[test]
    fn missing_map_is_one_finding() {
        assert_eq!(
            check_map("# Nothing\n"),
            ["ARCHITECTURE.md: no section `Code map`"]
        );
    }
}
