//! `cargo xtask house`: how the code is built, in figures. Import circles between the files of
//! each crate, the largest file, the size of the product, and the policies. It changes nothing.
//!
//! `tidy` compares the circles with recorded numbers, which may only fall.

mod circles;
mod crate_modules;
mod imports;
mod policies;
mod tokens;

use std::collections::BTreeSet;

use anyhow::Result;
use serde::Serialize;

use crate::shell;
use crate::tidy::files::{SourceFile, read_all};
use crate::tidy::source;
use crate_modules::CrateModules;

/// The crates that users run: not tests, benchmarks and developer commands.
const PRODUCT_CRATES: [&str; 13] = [
    "bafs",
    "bafs-api",
    "bafs-client",
    "bafs-engine",
    "bafs-import",
    "bafs-profile",
    "bafs-proto",
    "bafs-queue",
    "bafs-sched",
    "bafs-server",
    "bafs-sim",
    "bafs-tree",
    "bafs-workflow",
];

/// Files of one crate that may import each other in a circle.
const CIRCLE_FILES_MAX: usize = 3;

/// Circles of more files than that, of all crates, when this was recorded. It may only fall.
const RECORDED_CIRCLES: usize = 0;

/// Files of the largest circle, when this was recorded. It may only fall.
const RECORDED_LARGEST_CIRCLE: usize = 3;

/// The figures, as `--json` prints them.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct HouseFigures {
    circles_over_3: usize,
    largest_circle: usize,
    largest_file_lines: usize,
    policy_families: usize,
    policies: usize,
    product_lines: usize,
    state_writers_violations: usize,
}

/// A crate's files, and those that import each other.
struct CrateMeasure {
    directory: String,
    /// Of the files that ship: neither blank nor comments.
    lines: usize,
    /// Each with its files, the largest first.
    circles: Vec<Vec<String>>,
    /// A file, and a file that it imports from.
    imports: BTreeSet<(String, String)>,
}

/// The command: `--json` prints the figures as one line, at the end; `--imports` prints who
/// imports from whom in each circle.
pub(crate) fn run_and_print(arguments: &[String]) -> Result<()> {
    let files = read_all(&shell::checkout_root())?;
    let has_option = |name: &str| arguments.iter().any(|argument| argument == name);
    let crates = measure_crates(&files);
    for measure in &crates {
        println!("{}: {} lines", measure.directory, measure.lines);
        for circle in &measure.circles {
            println!("  circle of {}: {}", circle.len(), circle.join(" "));
            if has_option("--imports") {
                print_imports(measure, circle);
            }
        }
    }
    let figures = summarise_figures(&files, &crates);
    match has_option("--json") {
        true => println!("{}", serde_json::to_string(&figures)?),
        false => println!("{figures:#?}"),
    }
    Ok(())
}

/// From whom each file of a circle imports in it.
fn print_imports(measure: &CrateMeasure, circle: &[String]) {
    for file in circle {
        let imports = measure.imports.iter().filter(|(from, _)| from == file);
        let in_circle = imports.filter(|(_, to)| circle.contains(to));
        let sources: Vec<&str> = in_circle.map(|(_, to)| to.as_str()).collect();
        println!("    {file} imports from {}", sources.join(" "));
    }
}

/// What `tidy` says of circles: each is a sentence.
pub(crate) fn check_circles(files: &[SourceFile]) -> Vec<String> {
    let crates = measure_crates(files);
    let figures = summarise_figures(files, &crates);
    compare_with_recorded(&figures, RECORDED_CIRCLES, RECORDED_LARGEST_CIRCLE)
}

fn compare_with_recorded(figures: &HouseFigures, circles: usize, largest: usize) -> Vec<String> {
    let measured = [
        (
            "import circles above three files",
            figures.circles_over_3,
            circles,
        ),
        (
            "files in the largest import circle",
            figures.largest_circle,
            largest,
        ),
    ];
    let differing = measured
        .into_iter()
        .filter(|(_, now, before)| now != before);
    let sentences = differing.map(|(what, now, before)| match now > before {
        true => {
            format!("{now} {what}, where {before} are recorded: `cargo xtask house` lists them")
        }
        false => format!("{now} {what}, where {before} are recorded: record the lower number"),
    });
    sentences.collect()
}

fn measure_crates(files: &[SourceFile]) -> Vec<CrateMeasure> {
    let manifests = files
        .iter()
        .filter_map(|file| file.path.strip_suffix("/Cargo.toml"));
    let crates = manifests.filter(|directory| !directory.contains('/'));
    crates
        .map(|directory| measure_crate(directory, files))
        .collect()
}

fn measure_crate(directory: &str, files: &[SourceFile]) -> CrateMeasure {
    let modules = CrateModules::read(directory, files);
    let imports = imports::find_imports(&modules);
    let mut circles: Vec<Vec<String>> = circles::find_circles(modules.files.len(), &imports)
        .into_iter()
        .map(|circle| {
            circle
                .into_iter()
                .map(|file| modules.files[file].clone())
                .collect()
        })
        .collect();
    circles.sort_by_key(|circle: &Vec<String>| std::cmp::Reverse(circle.len()));
    let paths = imports.iter();
    let paths = paths.map(|&(from, to)| (modules.files[from].clone(), modules.files[to].clone()));
    CrateMeasure {
        directory: directory.to_owned(),
        lines: modules.lines.iter().sum(),
        circles,
        imports: paths.collect(),
    }
}

fn summarise_figures(files: &[SourceFile], crates: &[CrateMeasure]) -> HouseFigures {
    let sizes = || crates.iter().flat_map(|it| &it.circles).map(Vec::len);
    let product = crates
        .iter()
        .filter(|it| PRODUCT_CRATES.contains(&it.directory.as_str()));
    let rust = files.iter().filter(|file| file.has_extension("rs"));
    let policies = policies::measure_policies(files, crates);
    HouseFigures {
        circles_over_3: sizes().filter(|size| *size > CIRCLE_FILES_MAX).count(),
        largest_circle: sizes().max().unwrap_or(0),
        largest_file_lines: rust
            .map(|file| source::count_code_lines(&file.text))
            .max()
            .unwrap_or(0),
        policy_families: policies.families,
        policies: policies.implementations,
        product_lines: product.map(|it| it.lines).sum(),
        state_writers_violations: policies.violations,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn source_files(files: &[(&str, &str)]) -> Vec<SourceFile> {
        let all = files.iter().map(|&(path, text)| SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        });
        all.collect()
    }

    fn figures(files: &[(&str, &str)]) -> HouseFigures {
        let files = source_files(files);
        summarise_figures(&files, &measure_crates(&files))
    }

    #[test]
    fn product_lines_leave_out_tests_and_comments() {
        let library = "//! A.\n\nmod b;\n#[cfg(test)]\nmod c;\n\
                       fn a() {\n    /* no\n    */ b();\n}\n\
                       #[cfg(test)]\nmod tests {\n    fn t() {}\n}\nfn z() {}\n";
        let found = figures(&[
            ("bafs/Cargo.toml", ""),
            ("bafs/src/lib.rs", library),
            (
                "bafs/src/b.rs",
                "// No.\nconst B: &str = \"// \\\n  yes\";\n",
            ),
            ("bafs/src/c.rs", "fn fixture() {}\n"),
            ("bafs/tests/all.rs", "fn test() {}\n"),
            ("xtask/Cargo.toml", ""),
            ("xtask/src/main.rs", "fn main() {}\n"),
        ]);
        assert_eq!(found.product_lines, 5 + 2);
        assert_eq!((found.policy_families, found.policies), (0, 0));
    }

    #[test]
    fn circles_of_all_crates_are_counted() {
        let ring = |next: &str| format!("use crate::{next}::X;\npub struct X;\n");
        let (a, b, c, d) = (ring("b"), ring("c"), ring("d"), ring("a"));
        let found = figures(&[
            ("bafs/Cargo.toml", ""),
            ("bafs/src/lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
            ("bafs/src/a.rs", &a),
            ("bafs/src/b.rs", &b),
            ("bafs/src/c.rs", &c),
            ("bafs/src/d.rs", &d),
            ("xtask/Cargo.toml", ""),
            ("xtask/src/main.rs", "mod a;\nmod b;\n"),
            ("xtask/src/a.rs", "use super::b::X;\npub struct X;\n"),
            ("xtask/src/b.rs", "pub struct X;\nfn f(_: crate::a::X) {}\n"),
        ]);
        assert_eq!((found.circles_over_3, found.largest_circle), (1, 4));
    }

    #[test]
    fn recorded_numbers_only_fall() {
        let found = HouseFigures {
            circles_over_3: 2,
            largest_circle: 30,
            largest_file_lines: 0,
            policy_families: 0,
            policies: 0,
            product_lines: 0,
            state_writers_violations: 0,
        };
        assert!(compare_with_recorded(&found, 2, 30).is_empty());
        let risen = compare_with_recorded(&found, 1, 30);
        assert!(
            risen.len() == 1 && risen[0].ends_with("lists them"),
            "{risen:?}"
        );
        let fallen = compare_with_recorded(&found, 2, 31);
        assert!(fallen[0].ends_with("record the lower number"), "{fallen:?}");
    }
}
