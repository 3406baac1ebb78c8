//! The modules of a crate as its code declares them: which file each is in, what it defines, what
//! it imports, and which paths and names its code uses. Resolves nothing.
//!
//! Only modules that ship are read. Files are found by the usual rule, without `#[path]`.

use std::collections::{BTreeMap, BTreeSet};

use super::tokens::{Token, find_group_end, read_shipped_code};
use crate::tidy::files::SourceFile;
use crate::tidy::source;

/// Keywords that a defined name follows.
const ITEM_KEYWORDS: [&str; 8] = [
    "fn", "struct", "enum", "union", "trait", "type", "const", "static",
];

/// A name that `use` brings into a module, or all names when it has none.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UseDeclaration {
    /// The name; nothing for `*`.
    pub(super) name: Option<String>,
    pub(super) path: Vec<String>,
    /// Whether others may import it from here: `pub use`, of any visibility.
    pub(super) is_public: bool,
}

/// A module, in a file of its own or inside one.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// Position of its file.
    pub(super) file: usize,
    pub(super) parent: Option<usize>,
    pub(super) children: BTreeMap<String, usize>,
    pub(super) items: BTreeSet<String>,
    pub(super) uses: Vec<UseDeclaration>,
    /// Paths of two names and more in the code.
    pub(super) paths: BTreeSet<Vec<String>>,
    /// Names that stand alone in the code.
    pub(super) names: BTreeSet<String>,
}

/// All modules of a crate; the first one is its root.
#[derive(Debug, Default)]
pub(super) struct CrateModules {
    pub(super) modules: Vec<Module>,
    /// Paths of the files, as seen from the root of the checkout.
    pub(super) files: Vec<String>,
    /// For each file, its lines that are neither blank, nor comments, nor tests.
    pub(super) lines: Vec<usize>,
}

/// A module whose file is still to be read.
struct PendingFile {
    module: usize,
    /// Where it may be.
    candidates: Vec<String>,
}

impl CrateModules {
    /// Reads a crate from the root of its library, else of its program. A program beside a library
    /// is read too, as a root of its own.
    pub(super) fn read(directory: &str, files: &[SourceFile]) -> Self {
        let mut all = Self::default();
        let by_path: BTreeMap<&str, &SourceFile> = files
            .iter()
            .map(|file| (file.path.as_str(), file))
            .collect();
        for root in ["lib.rs", "main.rs"] {
            let path = format!("{directory}/src/{root}");
            if by_path.contains_key(path.as_str()) {
                all.read_tree(path, &by_path);
            }
        }
        all
    }

    fn read_tree(&mut self, root: String, by_path: &BTreeMap<&str, &SourceFile>) {
        let module = self.add_module(None, usize::MAX);
        let candidates = vec![root];
        let mut pending = vec![PendingFile { module, candidates }];
        while let Some(next) = pending.pop() {
            let mut candidates = next.candidates.iter();
            let Some(file) = candidates.find_map(|path| by_path.get(path.as_str())) else {
                continue;
            };
            self.modules[next.module].file = self.files.len();
            self.files.push(file.path.clone());
            self.lines.push(count_shipped_lines(&file.text));
            pending.extend(self.read_file(next.module, &file.path, &file.text));
        }
    }

    fn add_module(&mut self, parent: Option<usize>, file: usize) -> usize {
        self.modules.push(Module {
            file,
            parent,
            ..Module::default()
        });
        self.modules.len() - 1
    }

    /// Reads a file into its module; answers the modules that it declares in other files.
    fn read_file(&mut self, module: usize, path: &str, text: &str) -> Vec<PendingFile> {
        let blanked = source::blank_non_code(text);
        let code = read_shipped_code(&blanked);
        let mut reader = FileReader {
            tokens: &code.tokens,
            directory: modules_directory(path, self.modules[module].parent.is_none()),
            open_modules: vec![(module, 0, String::new())],
            depth: 0,
            pending: Vec::new(),
        };
        let mut at = 0;
        while at < code.tokens.len() {
            at = reader.read_token(self, at);
        }
        reader.pending
    }
}

/// Where the modules that a file declares are.
fn modules_directory(path: &str, is_root: bool) -> String {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    if is_root || name == "mod.rs" {
        return directory.to_owned();
    }
    path.trim_end_matches(".rs").to_owned()
}

fn count_shipped_lines(text: &str) -> usize {
    let blanked = source::blank_non_code(text);
    let tests = read_shipped_code(&blanked).test_lines;
    let code = source::blank_comments(text);
    let is_shipped = |line: usize| {
        !tests
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&line))
    };
    let lines = code.lines().enumerate();
    lines
        .filter(|(at, line)| !line.trim().is_empty() && is_shipped(*at))
        .count()
}

struct FileReader<'t> {
    tokens: &'t [Token<'t>],
    directory: String,
    /// The module that is read, behind those around it: with the depth of its braces, and the
    /// folders that its inline modules add.
    open_modules: Vec<(usize, usize, String)>,
    depth: usize,
    pending: Vec<PendingFile>,
}

impl FileReader<'_> {
    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.text)
    }

    fn current(&self) -> (usize, usize, &str) {
        let last = self.open_modules.last();
        last.map_or((0, 0, ""), |(module, depth, folder)| {
            (*module, *depth, folder.as_str())
        })
    }

    /// Reads what starts here, and answers where the next thing starts.
    fn read_token(&mut self, all: &mut CrateModules, at: usize) -> usize {
        let (module, depth, _) = self.current();
        let next_is_name = self.tokens.get(at + 1).is_some_and(Token::is_name);
        match self.text(at) {
            "{" => self.depth += 1,
            "}" => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth < depth {
                    self.open_modules.pop();
                }
            }
            "use" => return self.read_use(all, at),
            "mod" if next_is_name => return self.read_module(all, at),
            "macro_rules" => {
                all.modules[module]
                    .items
                    .insert(self.text(at + 2).to_owned());
                return find_group_end(self.tokens, at + 3);
            }
            keyword if ITEM_KEYWORDS.contains(&keyword) && next_is_name => {
                // `const fn f` and `static mut S` define what comes last.
                let name_at = at + 1 + usize::from(self.text(at + 1) == "mut");
                let name = self.text(name_at);
                if ITEM_KEYWORDS.contains(&name) || matches!(name, "unsafe" | "async") {
                    return at + 1;
                }
                if self.depth == depth {
                    all.modules[module].items.insert(name.to_owned());
                }
                return name_at + 1;
            }
            _ if self.tokens[at].is_name() => return self.read_path(all, at),
            _ => {}
        }
        at + 1
    }

    fn read_module(&mut self, all: &mut CrateModules, at: usize) -> usize {
        let (parent, _, folder) = self.current();
        let name = self.text(at + 1).to_owned();
        let folder = format!("{folder}/{name}");
        let file = all.modules[parent].file;
        let child = all.add_module(Some(parent), file);
        all.modules[parent].children.insert(name, child);
        if self.text(at + 2) == "{" {
            self.depth += 1;
            self.open_modules.push((child, self.depth, folder));
        } else {
            let place = format!("{}{folder}", self.directory);
            self.pending.push(PendingFile {
                module: child,
                candidates: vec![format!("{place}.rs"), format!("{place}/mod.rs")],
            });
        }
        at + 3
    }

    fn read_use(&self, all: &mut CrateModules, at: usize) -> usize {
        let before = at.checked_sub(1).map_or("", |before| self.text(before));
        // A function may import too, and `pub(crate)` ends with a bracket.
        let is_public = before == "pub" || before == ")";
        let mut found = Vec::new();
        let end = self.read_use_tree(at + 1, &[], &mut found);
        let (module, ..) = self.current();
        let uses = found.into_iter().map(|(name, path)| UseDeclaration {
            name,
            path,
            is_public,
        });
        all.modules[module].uses.extend(uses);
        end
    }

    /// Reads a tree of imports, and answers what is behind it.
    fn read_use_tree(
        &self,
        start: usize,
        prefix: &[String],
        found: &mut Vec<(Option<String>, Vec<String>)>,
    ) -> usize {
        let (mut at, mut path) = (start, prefix.to_vec());
        loop {
            match self.text(at) {
                "::" => at += 1,
                "*" => {
                    found.push((None, path));
                    return at + 1;
                }
                "{" => {
                    at += 1;
                    while !matches!(self.text(at), "}" | "") {
                        at = self.read_use_tree(at, &path, found);
                        at += usize::from(self.text(at) == ",");
                    }
                    return at + 1;
                }
                "as" => {
                    found.push((Some(self.text(at + 1).to_owned()), path));
                    return at + 2;
                }
                name if self.tokens.get(at).is_some_and(Token::is_name) => {
                    // `{self}` is what is before the brackets.
                    if name != "self" || path.is_empty() {
                        path.push(name.to_owned());
                    }
                    at += 1;
                }
                _ => {
                    if let Some(name) = path.last().cloned() {
                        found.push((Some(name), path));
                    }
                    return at.max(start + 1);
                }
            }
        }
    }

    fn read_path(&self, all: &mut CrateModules, at: usize) -> usize {
        let mut path = vec![self.text(at).to_owned()];
        let mut end = at + 1;
        while self.text(end) == "::" && self.tokens.get(end + 1).is_some_and(Token::is_name) {
            path.push(self.text(end + 1).to_owned());
            end += 2;
        }
        let before = at.checked_sub(1).map_or("", |before| self.text(before));
        let (module, ..) = self.current();
        // Fields and methods, lifetimes, and paths from elsewhere are no names of this module.
        if !matches!(before, "." | "'" | "::") {
            match path.len() {
                1 => all.modules[module].names.extend(path),
                _ => {
                    all.modules[module].paths.insert(path);
                }
            }
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::house::tests::source_files;

    fn read(text: &str) -> CrateModules {
        CrateModules::read("a", &source_files(&[("a/src/lib.rs", text)]))
    }

    #[test]
    fn modules_have_their_items_and_imports() {
        let all = read(
            "pub(crate) use b::{self, C as D, e::*};\nconst fn f() { fn inner() {} }\n\
             static mut S: u8 = 0;\nmod m { pub struct T; }\nmacro_rules! x { () => { y } }\n",
        );
        let root = &all.modules[0];
        let items: Vec<&str> = root.items.iter().map(String::as_str).collect();
        assert_eq!(items, ["S", "f", "x"]);
        let uses: Vec<String> = root
            .uses
            .iter()
            .map(|it| {
                format!(
                    "{}={}",
                    it.name.as_deref().unwrap_or("*"),
                    it.path.join("::")
                )
            })
            .collect();
        assert_eq!(uses, ["b=b", "D=b::C", "*=b::e"]);
        assert!(root.uses.iter().all(|it| it.is_public));
        assert!(all.modules[root.children["m"]].items.contains("T"));
    }

    #[test]
    fn code_has_paths_and_names() {
        let all = read("fn f<'l>(a: &'l X) { a.b(); crate::c::d::<u8>(); E::F }\n");
        let root = &all.modules[0];
        let paths: Vec<String> = root.paths.iter().map(|path| path.join("::")).collect();
        assert_eq!(paths, ["E::F", "crate::c::d"]);
        assert!(root.names.contains("X") && !root.names.contains("b"));
    }

    #[test]
    fn files_of_modules_are_found() {
        let files = source_files(&[
            (
                "a/src/main.rs",
                "mod b;\nmod c;\nmod d { mod e; }\nmod gone;\n",
            ),
            ("a/src/b.rs", "mod f;\n"),
            ("a/src/b/f.rs", ""),
            ("a/src/c/mod.rs", "mod g;\n"),
            ("a/src/c/g.rs", ""),
            ("a/src/d/e.rs", ""),
            ("a/src/unused.rs", ""),
        ]);
        let mut found = CrateModules::read("a", &files).files;
        found.sort();
        let expected = ["b.rs", "b/f.rs", "c/g.rs", "c/mod.rs", "d/e.rs", "main.rs"];
        assert_eq!(found, expected.map(|name| format!("a/src/{name}")));
    }
}
