//! Rust code as tokens: names, `::`, and single marks. Literals and comments are blanked before;
//! what belongs to tests only is left out here. No parser.

/// A token and its line, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    pub(super) line: usize,
}

impl Token<'_> {
    pub(super) fn is_name(&self) -> bool {
        self.text
            .starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// The code that ships.
pub(super) struct ShippedCode<'a> {
    pub(super) tokens: Vec<Token<'a>>,
    /// Lines, from 0, of what belongs to tests only: the first and the last of each part.
    pub(super) test_lines: Vec<(usize, usize)>,
}

/// Splits blanked code into tokens, without items under `#[cfg(test)]`.
pub(super) fn read_shipped_code(blanked: &str) -> ShippedCode<'_> {
    let all = split_tokens(blanked);
    let (mut tokens, mut test_lines) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < all.len() {
        if is_at(&all, at, &["#", "!", "[", "cfg", "(", "test", ")", "]"]) {
            test_lines.push((0, usize::MAX));
            tokens.clear();
            break;
        }
        let is_test = is_at(&all, at, &["#", "[", "cfg", "(", "test", ")", "]"])
            || is_at(&all, at, &["#", "[", "cfg", "(", "all", "(", "test"]);
        if is_test {
            let end = find_item_end(&all, at);
            test_lines.push((all[at].line, all[end - 1].line));
            at = end;
        } else {
            tokens.push(all[at]);
            at += 1;
        }
    }
    ShippedCode { tokens, test_lines }
}

fn is_at(tokens: &[Token<'_>], at: usize, words: &[&str]) -> bool {
    let found = tokens[at..].iter().map(|token| token.text);
    tokens.len() - at >= words.len() && found.zip(words).all(|(found, word)| found == *word)
}

fn split_tokens(code: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    for (line, text) in code.lines().enumerate() {
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let length = match first {
                c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
                ':' if rest.starts_with("::") => 2,
                c => c.len_utf8(),
            };
            tokens.push(Token {
                text: &rest[..length],
                line,
            });
            rest = rest[length..].trim_start();
        }
    }
    tokens
}

/// Behind the last token of the item, field or statement whose attributes start here.
fn find_item_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut at = start;
    while is_at(tokens, at, &["#", "["]) {
        at = find_group_end(tokens, at + 1);
    }
    let keywords = [
        "use", "const", "static", "type", "let", "fn", "mod", "impl", "struct", "enum", "trait",
    ];
    let keyword = tokens[at..]
        .iter()
        .take(6)
        .find(|token| keywords.contains(&token.text));
    let keyword = keyword.map(|token| token.text);
    let ends_with_semicolon = matches!(keyword, Some("use" | "const" | "static" | "type" | "let"));
    let ends_with_comma = keyword.is_none();
    while at < tokens.len() {
        match tokens[at].text {
            ";" => return at + 1,
            "," if ends_with_comma => return at + 1,
            "}" => return at.max(start + 1),
            "{" => {
                at = find_group_end(tokens, at);
                if !ends_with_semicolon {
                    return at;
                }
            }
            "(" | "[" => at = find_group_end(tokens, at),
            _ => at += 1,
        }
    }
    tokens.len()
}

/// Behind the bracket that closes the one here.
pub(super) fn find_group_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate().skip(start) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shipped(code: &str) -> String {
        let code = read_shipped_code(code);
        let texts: Vec<&str> = code.tokens.iter().map(|token| token.text).collect();
        texts.join(" ")
    }

    #[test]
    fn code_is_split_into_names_and_marks() {
        assert_eq!(shipped("a::b<'c>( d_1 );"), "a :: b < ' c > ( d_1 ) ;");
    }

    #[test]
    fn test_items_are_left_out() {
        let cases = [
            ("#[cfg(test)] mod t { fn a() { } } b", "b"),
            ("#[cfg(test)] #[x(y)] use a::{b, c}; d", "d"),
            ("#[cfg(test)] fn f<A, B>(a: A) -> [u8; 2] { } b", "b"),
            (
                "struct S { #[cfg(test)] a: u8, b: u8 }",
                "struct S { b : u8 }",
            ),
            ("f { #[cfg(test)] a: u8 } b", "f { } b"),
            ("#[cfg(test)] pub(crate) mod a; b", "b"),
            ("#![cfg(test)] a b", ""),
            ("#[cfg(unix)] a", "# [ cfg ( unix ) ] a"),
        ];
        for (code, expected) in cases {
            assert_eq!(shipped(code), expected, "{code}");
        }
    }

    #[test]
    fn lines_of_test_items_are_known() {
        let code = read_shipped_code("a\n#[cfg(test)]\nmod t {\n}\nb\n");
        assert_eq!(code.test_lines, [(1, 3)]);
    }
}
