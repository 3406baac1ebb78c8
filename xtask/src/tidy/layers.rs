//! Who may know whom: crates, dependencies of one file, pure logic, unsafe code. The tables come
//! first: a new arrow is a line here, a line in ARCHITECTURE.md, and a decision record.

use std::collections::BTreeMap;

use super::files::SourceFile;
use super::source::{blank_non_code, find_word_starts, has_word, strip_tests};
use super::violation::RuleViolation;

/// A dependency that is named in few places, so that replacing it touches few.
struct ConfinedDependency {
    /// As it is written in code.
    name: &'static str,
    /// Files (or the beginnings of their paths) that may name it.
    allowed_paths: &'static [&'static str],
    /// In how many files altogether.
    files_max: usize,
}

const CONFINED_DEPENDENCIES: &[ConfinedDependency] = &[
    ConfinedDependency {
        name: "quinn",
        allowed_paths: &[
            "bafs-proto/src/net/quic.rs",
            "bafs-proto/src/net/quic/listener.rs",
        ],
        files_max: 2,
    },
    ConfinedDependency {
        name: "tokio_rustls",
        allowed_paths: &["bafs-proto/src/net/tls.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "bincode",
        allowed_paths: &["bafs-proto/src/codec.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "rmp_serde",
        allowed_paths: &[
            "bafs-sched/src/io/journal/format.rs",
            "bafs-sched/src/state/row_encoding.rs",
        ],
        files_max: 2,
    },
    ConfinedDependency {
        name: "blake3",
        allowed_paths: &["bafs-proto/src/hash.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "biscuit_auth",
        allowed_paths: &["bafs-proto/src/token.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "rcgen",
        allowed_paths: &["bafs-proto/src/identity.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "fuser",
        allowed_paths: &[
            "bafs-client/src/fuse",
            "tests/src/bench/minimal_file_systems",
        ],
        files_max: usize::MAX,
    },
    ConfinedDependency {
        name: "io_uring",
        allowed_paths: &["bafs-client/src/kernel.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "lru",
        allowed_paths: &["bafs-server/src/"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "opendal",
        allowed_paths: &["bafs-server/src/home_clients/object_home"],
        files_max: 3,
    },
    ConfinedDependency {
        name: "opendal_http_transport_reqwest",
        allowed_paths: &["bafs-server/src/home_clients/object_home"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "redb",
        allowed_paths: &[
            "bafs-server/src/home_server/upload_fences.rs",
            "bafs-server/src/home_server/upload_table.rs",
            "bafs-server/src/storage/database.rs",
            "bafs/src/learned/learned_store.rs",
        ],
        files_max: 4,
    },
    ConfinedDependency {
        name: "toml",
        allowed_paths: &[
            "bafs/src/config.rs",
            "bafs-sim/src/planner/environment.rs",
            "bafs-server/src/home_clients/settings.rs",
        ],
        files_max: 3,
    },
    ConfinedDependency {
        name: "hyper",
        allowed_paths: &["bafs/src/metrics/http.rs", "bafs-api/src/server.rs"],
        files_max: 2,
    },
    ConfinedDependency {
        name: "hyper_util",
        allowed_paths: &["bafs/src/metrics/http.rs", "bafs-api/src/server.rs"],
        files_max: 2,
    },
    ConfinedDependency {
        name: "axum",
        allowed_paths: &["bafs-api/src/"],
        files_max: usize::MAX,
    },
    ConfinedDependency {
        name: "prometheus_client",
        allowed_paths: &["bafs/src/metrics/openmetrics.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "plotters",
        allowed_paths: &["bafs/src/svg_chart.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "glob",
        allowed_paths: &[
            "bafs-server/src/storage/file_set.rs",
            "bafs-workflow/src/glob_pattern.rs",
        ],
        files_max: 2,
    },
    ConfinedDependency {
        name: "tar",
        allowed_paths: &["bafs/src/image/"],
        files_max: 3,
    },
    ConfinedDependency {
        name: "flate2",
        allowed_paths: &["bafs/src/image/"],
        files_max: 2,
    },
    ConfinedDependency {
        name: "zstd",
        allowed_paths: &["bafs/src/image/"],
        files_max: 2,
    },
    ConfinedDependency {
        name: "sha2",
        allowed_paths: &["bafs/src/image/digest.rs"],
        files_max: 1,
    },
    ConfinedDependency {
        name: "backhand",
        allowed_paths: &["bafs/src/image/"],
        files_max: 2,
    },
    ConfinedDependency {
        name: "clap",
        allowed_paths: &["bafs/", "xtask/"],
        files_max: usize::MAX,
    },
];

/// Which of our crates a crate of ours may depend on, for its tests too.
const ALLOWED_CRATE_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("bafs-proto", &[]),
    ("bafs-engine", &[]),
    ("bafs-profile", &["bafs-workflow"]),
    ("bafs-tree", &["bafs-proto"]),
    ("bafs-server", &["bafs-proto", "bafs-tree"]),
    ("bafs-client", &["bafs-profile", "bafs-proto", "bafs-tree"]),
    ("bafs-workflow", &["bafs-proto"]),
    ("bafs-sched", &["bafs-proto", "bafs-workflow"]),
    ("bafs-sim", &["bafs-proto", "bafs-workflow", "bafs-sched"]),
    ("bafs-queue", &["bafs-proto"]),
    ("bafs-api", &["bafs-proto", "bafs-queue"]),
    ("bafs-import", &["bafs-workflow"]),
    (
        "bafs",
        &[
            "bafs-import",
            "bafs-profile",
            "bafs-proto",
            "bafs-engine",
            "bafs-tree",
            "bafs-server",
            "bafs-client",
            "bafs-workflow",
            "bafs-sched",
            "bafs-sim",
            "bafs-queue",
            "bafs-api",
        ],
    ),
    (
        "bafs-tests",
        &[
            "bafs-profile",
            "bafs-proto",
            "bafs-engine",
            "bafs-tree",
            "bafs-server",
            "bafs-client",
            "bafs-workflow",
            "bafs-sched",
            "bafs-sim",
            "bafs-queue",
            "bafs-api",
            "bafs-import",
            "bafs",
        ],
    ),
    ("xtask", &[]),
];

/// What decides has no business with these: they wait, touch the world, or differ between runs.
const FORBIDDEN_IN_LOGIC: [&str; 11] = [
    "async",
    "std::fs",
    "std::net",
    "std::thread",
    "tokio",
    "Instant::now",
    "SystemTime",
    "HashMap",
    "HashSet",
    "rand",
    "quinn",
];

/// What decides, beside folders named `logic`.
const PURE_FOLDERS: [&str; 4] = [
    "bafs-sched/src/scheduler.rs",
    "bafs-sched/src/transition/",
    "bafs-sched/src/state/",
    "bafs-sched/src/policy/",
];

/// The only file of a crate that may hold unsafe code: calls that no safe crate offers.
const UNSAFE_FILE: &str = "kernel.rs";

/// Rules about one file.
pub(super) fn check_file(file: &SourceFile) -> Vec<RuleViolation> {
    if !file.has_extension("rs") {
        return Vec::new();
    }
    let code = blank_non_code(&file.text);
    let mut findings = check_confined_dependencies(&file.path, &code);
    let is_pure = PURE_FOLDERS
        .iter()
        .any(|place| file.path.starts_with(place));
    let mut parts = file.path.split('/');
    if is_pure || parts.any(|part| part == "logic" || part == "logic.rs") {
        findings.extend(check_logic(&file.path, strip_tests(&code)));
    }
    if file_name(&file.path) != UNSAFE_FILE {
        findings.extend(find_lines_with(&file.path, &code, "unsafe", |_| {
            format!("unsafe code belongs into the crate's `{UNSAFE_FILE}`")
        }));
    }
    findings
}

fn check_confined_dependencies(path: &str, code: &str) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    for rule in CONFINED_DEPENDENCIES {
        if rule
            .allowed_paths
            .iter()
            .any(|place| path.starts_with(place))
        {
            continue;
        }
        for (index, line) in code.lines().enumerate() {
            if has_crate_name(line, rule.name) {
                let places = rule.allowed_paths.join(", ");
                let what = format!("`{}` may be named only in {places}", rule.name);
                findings.push(RuleViolation::new(path, index + 1, what));
            }
        }
    }
    findings
}

/// Whether the line names the crate: `name::…` or `use name…`, not a module `…::name::`.
fn has_crate_name(line: &str, name: &str) -> bool {
    find_word_starts(line, name).into_iter().any(|start| {
        let before = line[..start].trim_end();
        let after = line[start + name.len()..].trim_start();
        let leads_path = before.strip_suffix("::").is_none_or(|rest| {
            // A leading `::` means the crate itself.
            !rest.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '>')
        });
        let imported = before.ends_with("use") && after.starts_with([';', ' ']);
        leads_path && after.starts_with("::") || imported
    })
}

fn check_logic(path: &str, code: &str) -> Vec<RuleViolation> {
    let rule = |word: &str| format!("what decides does nothing else: no `{word}` in it");
    FORBIDDEN_IN_LOGIC
        .iter()
        .flat_map(|word| find_lines_with(path, code, word, rule))
        .collect()
}

fn find_lines_with(
    path: &str,
    code: &str,
    word: &str,
    what: impl Fn(&str) -> String,
) -> Vec<RuleViolation> {
    let lines = code
        .lines()
        .enumerate()
        .filter(|(_, line)| has_word(line, word));
    lines
        .map(|(index, _)| RuleViolation::new(path, index + 1, what(word)))
        .collect()
}

/// Rules about all files: in how many a dependency is named, how many hold unsafe code.
pub(super) fn check_file_counts(files: &[SourceFile]) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    let rust: Vec<_> = files
        .iter()
        .filter(|file| file.has_extension("rs"))
        .map(|file| (file, blank_non_code(&file.text)))
        .collect();
    for rule in CONFINED_DEPENDENCIES {
        let in_place = |path: &str| {
            rule.allowed_paths
                .iter()
                .any(|place| path.starts_with(place))
        };
        let named = rust
            .iter()
            .filter(|(file, code)| {
                in_place(&file.path) && code.lines().any(|line| has_crate_name(line, rule.name))
            })
            .skip(rule.files_max);
        findings.extend(named.map(|(file, _)| {
            let what = format!(
                "`{}` is named in more than {} file",
                rule.name, rule.files_max
            );
            RuleViolation::new(&file.path, 0, what)
        }));
    }
    let mut kernel_files = BTreeMap::new();
    for (file, _) in rust
        .iter()
        .filter(|(file, _)| file_name(&file.path) == UNSAFE_FILE)
    {
        let crate_dir = file.path.split('/').next().unwrap_or_default();
        if let Some(first) = kernel_files.insert(crate_dir, &file.path) {
            let what = format!("a crate has one `{UNSAFE_FILE}`; there is {first} already");
            findings.push(RuleViolation::new(&file.path, 0, what));
        }
    }
    findings
}

/// Rules about the arrows between our crates, from `cargo metadata`.
pub(super) fn check_crate_dependencies(metadata: &serde_json::Value) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let place = format!("{name}/Cargo.toml");
        let Some((_, allowed)) = ALLOWED_CRATE_DEPENDENCIES
            .iter()
            .find(|(known, _)| *known == name)
        else {
            let what = "a crate that xtask/src/tidy/layers.rs does not know";
            findings.push(RuleViolation::new(&place, 0, what));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let ours = ALLOWED_CRATE_DEPENDENCIES
                .iter()
                .any(|(known, _)| *known == target);
            if ours && !allowed.contains(&target) {
                let what = format!("{name} must not depend on {target}");
                findings.push(RuleViolation::new(&place, 0, what));
            }
        }
    }
    findings
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    fn check(path: &str, text: &str, expected: usize) {
        let found = check_file(&file(path, text));
        assert_eq!(found.len(), expected, "{path}: {text}: {found:?}");
    }

    #[test]
    fn dependency_is_named_only_in_listed_files() {
        check("bafs-proto/src/codec.rs", "use bincode::config;", 0);
        check("bafs-proto/src/message.rs", "use bincode::config;", 1);
        check(
            "bafs-proto/src/message.rs",
            "let a = ::bincode::config();",
            1,
        );
        check("bafs-proto/src/message.rs", "// bincode::config", 0);
        check(
            "bafs-server/src/io/store.rs",
            "use crate::logic::lru::Blocks;",
            0,
        );
        check("bafs-sched/src/driver.rs", "use lru::LruCache;", 1);
        check("bafs-client/src/fuse/reply.rs", "use fuser::Reply;", 0);
        check("bafs-client/src/agent.rs", "pub use fuser;", 1);
        check("bafs-client/src/agent.rs", "let fuser = 1; fuser.len();", 0);
    }

    #[test]
    fn single_file_dependency_stays_in_one_file() {
        let one = file("bafs-server/src/logic/blocks.rs", "use lru::LruCache;");
        let two = file(
            "bafs-server/src/io/fetch.rs",
            "fn a(b: lru::LruCache<u8, u8>) {}",
        );
        assert!(check_file_counts(&[file("a.rs", ""), one]).is_empty());
        let one = file("bafs-server/src/logic/blocks.rs", "use lru::LruCache;");
        assert_eq!(check_file_counts(&[one, two]).len(), 1);
    }

    #[test]
    fn logic_is_pure() {
        check(
            "bafs-sched/src/state/jobs.rs",
            "use std::collections::BTreeMap;",
            0,
        );
        check(
            "bafs-sched/src/state/jobs.rs",
            "use std::collections::HashMap;",
            1,
        );
        check(
            "bafs-sched/src/state/jobs.rs",
            "async fn a() { tokio::spawn(b) }",
            2,
        );
        check(
            "bafs-sched/src/state/jobs.rs",
            "/// Not async.\nfn operand() {}",
            0,
        );
        check(
            "bafs-sched/src/state/jobs.rs",
            "fn a() {}\n#[cfg(test)]\nuse std::fs;",
            0,
        );
        check("bafs-sched/src/io/journal.rs", "use std::fs;", 0);
    }

    #[test]
    fn unsafe_code_has_one_file_per_crate() {
        check("bafs-client/src/io/job.rs", "unsafe { fork() }", 1);
        check(
            "bafs-client/src/io/job.rs",
            "#![deny(unsafe_code)] // unsafe",
            0,
        );
        check("bafs-client/src/io/kernel.rs", "unsafe { fork() }", 0);
        let first = file("bafs-client/src/io/kernel.rs", "");
        let second = file("bafs-client/src/kernel.rs", "");
        let other = file("bafs-server/src/kernel.rs", "");
        assert_eq!(check_file_counts(&[first, second, other]).len(), 1);
    }

    #[test]
    fn crates_depend_in_one_direction() {
        let metadata = |name: &str, target: &str| {
            let dependencies = json!([{"name": target}]);
            json!({"packages": [{"name": name, "dependencies": dependencies}]})
        };
        assert!(check_crate_dependencies(&metadata("bafs-server", "bafs-proto")).is_empty());
        assert!(check_crate_dependencies(&metadata("bafs-server", "serde")).is_empty());
        assert_eq!(
            check_crate_dependencies(&metadata("bafs-server", "bafs-client")).len(),
            1
        );
        assert_eq!(
            check_crate_dependencies(&metadata("bafs-sched", "bafs-tree")).len(),
            1
        );
        assert_eq!(
            check_crate_dependencies(&metadata("bafs-sched", "bafs-sim")).len(),
            1
        );
        assert_eq!(
            check_crate_dependencies(&metadata("bafs-proto", "bafs-tree")).len(),
            1
        );
        assert_eq!(
            check_crate_dependencies(&metadata("bafs-new", "serde")).len(),
            1
        );
    }
}
