//! Which file of a crate imports from which: by `use`, and by paths and imported names in code. An
//! import counts for the file that defines the item, whatever modules pass it on.
//!
//! * `mod child;` alone is no import, nor is a re-export (`pub use`, of any visibility) whose name
//!   the file does not use itself: both only say where something is.
//! * A child that uses an item of its parent imports from the parent's file.
//! * `use module;` is no import; `module::item` is one from the file of the item.
//!
//! **Limits.** A method may be in another file than its type, in an `impl` of its own. A call of it
//! names only the type, if anything, so that the import is not seen. Circles through such methods
//! are larger than this says. Names that macros make are taken to be in the file of their module.

use std::collections::BTreeSet;

use super::crate_modules::{CrateModules, UseDeclaration};

/// Imports that pass an item on, one after the other; more is a circle of them.
const RE_EXPORTS_MAX: usize = 16;

/// What a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Module(usize),
    /// An item of a module, or something of it.
    Item(usize),
}

/// Pairs of files: one that imports, and one that it imports from.
pub(super) fn find_imports(all: &CrateModules) -> BTreeSet<(usize, usize)> {
    let mut imports = BTreeSet::new();
    for (index, module) in all.modules.iter().enumerate() {
        let mut targets = Vec::new();
        for declared in &module.uses {
            let is_used = match &declared.name {
                Some(name) => !declared.is_public || module.names.contains(name),
                None => !declared.is_public,
            };
            if is_used {
                targets.push(resolve_path(all, index, &declared.path, 0));
            }
        }
        let globs: Vec<&UseDeclaration> =
            module.uses.iter().filter(|it| it.name.is_none()).collect();
        let is_own = |name: &str| {
            let mut uses = module.uses.iter();
            module.items.contains(name) || uses.any(|it| it.name.as_deref() == Some(name))
        };
        for name in module
            .names
            .iter()
            .filter(|name| !globs.is_empty() && !is_own(name))
        {
            let found = globs
                .iter()
                .map(|glob| look_up_through(all, index, glob, name, 0));
            targets.extend(found);
        }
        let paths = module.paths.iter();
        targets.extend(paths.map(|path| resolve_path(all, index, path, 0)));
        for target in targets.into_iter().flatten() {
            if let Target::Item(other) = target {
                imports.insert((module.file, all.modules[other].file));
            }
        }
    }
    imports.retain(|(from, to)| from != to && *from < all.files.len() && *to < all.files.len());
    imports
}

/// What a path in a module names; nothing for what another crate has.
fn resolve_path(
    all: &CrateModules,
    module: usize,
    path: &[String],
    passed_on: usize,
) -> Option<Target> {
    let (mut at, mut rest) = (module, path);
    let mut is_ours = false;
    while let Some((first, behind)) = rest.split_first() {
        at = match first.as_str() {
            "crate" => root_of(all, at),
            "super" => all.modules[at].parent?,
            "self" => at,
            _ => break,
        };
        (rest, is_ours) = (behind, true);
    }
    for name in rest {
        match look_up(all, at, name, passed_on) {
            Some(Target::Module(child)) => (at, is_ours) = (child, true),
            Some(item) => return Some(item),
            // A macro made it.
            None => return is_ours.then_some(Target::Item(at)),
        }
    }
    Some(Target::Module(at))
}

fn root_of(all: &CrateModules, module: usize) -> usize {
    let mut at = module;
    while let Some(parent) = all.modules[at].parent {
        at = parent;
    }
    at
}

/// What a name in a module means.
fn look_up(all: &CrateModules, module: usize, name: &str, passed_on: usize) -> Option<Target> {
    if passed_on > RE_EXPORTS_MAX {
        return None;
    }
    let found = &all.modules[module];
    if let Some(child) = found.children.get(name) {
        return Some(Target::Module(*child));
    }
    if found.items.contains(name) {
        return Some(Target::Item(module));
    }
    let mut named = found
        .uses
        .iter()
        .filter(|it| it.name.as_deref() == Some(name));
    if let Some(declared) = named.next() {
        return resolve_path(all, module, &declared.path, passed_on + 1);
    }
    let mut globs = found.uses.iter().filter(|it| it.name.is_none());
    globs.find_map(|glob| look_up_through(all, module, glob, name, passed_on + 1))
}

/// What a name means by a `use …::*`.
fn look_up_through(
    all: &CrateModules,
    module: usize,
    glob: &UseDeclaration,
    name: &str,
    passed_on: usize,
) -> Option<Target> {
    match resolve_path(all, module, &glob.path, passed_on)? {
        Target::Module(source) if source != module => look_up(all, source, name, passed_on + 1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::house::tests::source_files;

    /// Imports as `from>to`, by the names of the files.
    #[track_caller]
    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let files: Vec<(String, &str)> = files
            .iter()
            .map(|(name, text)| (format!("a/src/{name}.rs"), *text))
            .collect();
        let named: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (path.as_str(), *text))
            .collect();
        let all = CrateModules::read("a", &source_files(&named));
        let short = |file: usize| {
            let name = all.files[file].trim_start_matches("a/src/");
            name.trim_end_matches(".rs").to_owned()
        };
        let mut found: Vec<String> = find_imports(&all)
            .into_iter()
            .map(|(from, to)| format!("{}>{}", short(from), short(to)))
            .collect();
        found.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn use_and_paths_are_imports() {
        check(
            &[
                ("lib", "mod b;\nmod c;\nmod d;\n"),
                ("b", "use crate::c::X;\nfn f() { super::d::g(); }\n"),
                ("c", "pub struct X;\n"),
                ("d", "pub fn g() { std::mem::drop(1) }\n"),
            ],
            &["b>c", "b>d"],
        );
    }

    #[test]
    fn re_exported_items_belong_to_their_file() {
        check(
            &[
                ("lib", "mod b;\nmod c;\n"),
                ("b", "use crate::c::X;\n"),
                (
                    "c/mod",
                    "mod d;\nmod e;\npub use d::X;\npub(crate) use e::*;\n",
                ),
                ("c/d", "pub struct X;\nfn f() { super::y() }\n"),
                ("c/e", "pub fn y() {}\n"),
            ],
            &["b>c/d", "c/d>c/e"],
        );
    }

    #[test]
    fn re_export_that_is_used_is_an_import() {
        check(
            &[
                ("lib", "mod b;\npub use b::X;\nfn f(_: X) {}\n"),
                ("b", "pub struct X;\n"),
            ],
            &["lib>b"],
        );
    }

    #[test]
    fn child_imports_from_its_parents_file() {
        check(
            &[
                ("lib", "mod b;\n"),
                ("b", "mod c;\npub struct X;\nmod inline { use super::X; }\n"),
                ("b/c", "use super::X;\n"),
            ],
            &["b/c>b"],
        );
    }

    #[test]
    fn imported_module_counts_by_its_items() {
        check(
            &[
                ("lib", "mod b;\nmod c;\n"),
                ("b", "use crate::c;\nfn f() { c::inner::g(c::V::W) }\n"),
                ("c", "pub mod inner;\npub enum V { W }\n"),
                ("c/inner", "pub fn g() {}\n"),
            ],
            &["b>c", "b>c/inner"],
        );
    }

    #[test]
    fn names_of_a_glob_are_imports() {
        check(
            &[
                ("lib", "mod b;\nmod c;\nmod d;\npub struct Unused;\n"),
                ("b", "use super::*;\nfn f() { d::g(X) }\n"),
                ("c", "pub struct X;\n"),
                ("d", "pub fn g() {}\n"),
            ],
            &["b>d"],
        );
        check(
            &[
                ("lib", "mod b;\nmod c;\nuse c::*;\n"),
                ("b", "use super::*;\nfn f(_: X) {}\n"),
                ("c", "pub struct X;\n"),
            ],
            &["b>c"],
        );
    }

    #[test]
    fn imports_of_tests_do_not_count() {
        check(
            &[
                ("lib", "mod b;\nmod c;\n"),
                ("b", "#[cfg(test)]\nmod tests {\n    use crate::c::X;\n}\n"),
                ("c", "pub struct X;\n"),
            ],
            &[],
        );
    }
}
