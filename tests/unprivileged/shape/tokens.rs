//! The part of Rust's lexical structure that the rules need: words and signs with their lines.
//! Comments and string literals are skipped, so that neither looks like code.

/// A word or a sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The word or sign.
    pub text: String,
    /// Its line, starting with 1.
    pub line: usize,
}

/// The tokens of a source text.
pub fn tokens(source: &str) -> Vec<Token> {
    let mut lexer = Lexer {
        chars: source.chars().collect(),
        at: 0,
        line: 1,
    };
    let mut found = Vec::new();
    while let Some(token) = lexer.next_token() {
        found.push(token);
    }
    found
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn step(&mut self) -> char {
        let c = self.peek(0);
        self.at += 1;
        if c == '\n' {
            self.line += 1;
        }
        c
    }

    fn done(&self) -> bool {
        self.at >= self.chars.len()
    }

    fn next_token(&mut self) -> Option<Token> {
        while !self.done() {
            let line = self.line;
            match (self.peek(0), self.peek(1)) {
                ('/', '/') => self.skip_while(|c| c != '\n'),
                ('/', '*') => self.skip_block_comment(),
                ('"', _) => self.skip_text(),
                ('\'', _) => self.skip_char_or_lifetime(),
                (c, _) if c.is_alphabetic() || c == '_' => {
                    let text = self.word();
                    if self.skip_prefixed_text(&text) {
                        continue;
                    }
                    return Some(Token { text, line });
                }
                (c, _) if c.is_whitespace() => {
                    self.step();
                }
                (c, _) if c.is_ascii_digit() => {
                    self.skip_while(|c| c.is_alphanumeric() || c == '_');
                }
                _ => {
                    let text = self.step().to_string();
                    return Some(Token { text, line });
                }
            }
        }
        None
    }

    fn word(&mut self) -> String {
        let mut text = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            text.push(self.step());
        }
        text
    }

    fn skip_while(&mut self, keep: impl Fn(char) -> bool) {
        while !self.done() && keep(self.peek(0)) {
            self.step();
        }
    }

    fn skip_block_comment(&mut self) {
        let mut depth = 0;
        while !self.done() {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                _ => {
                    self.step();
                    continue;
                }
            }
            self.step();
            self.step();
            if depth == 0 {
                return;
            }
        }
    }

    fn skip_text(&mut self) {
        self.step();
        while !self.done() {
            match self.step() {
                '\\' => {
                    self.step();
                }
                '"' => return,
                _ => {}
            }
        }
    }

    /// After a prefix such as `b`, `c`, `r` or `br`: skips the string literal that follows, if any.
    fn skip_prefixed_text(&mut self, prefix: &str) -> bool {
        match (prefix, self.peek(0)) {
            ("b" | "c", '"') => self.skip_text(),
            ("b", '\'') => self.skip_char_or_lifetime(),
            ("r" | "br" | "cr", '"' | '#') => return self.skip_raw_text(),
            _ => return false,
        }
        true
    }

    fn skip_raw_text(&mut self) -> bool {
        let hashes = (0..).take_while(|ahead| self.peek(*ahead) == '#').count();
        if self.peek(hashes) != '"' {
            return false; // r#word
        }
        (0..=hashes).for_each(|_| {
            self.step();
        });
        while !self.done() {
            let closes = (1..=hashes).all(|ahead| self.peek(ahead) == '#');
            if self.step() == '"' && closes {
                self.at += hashes;
                break;
            }
        }
        true
    }

    /// `'a'`, `'\n'`, `'{'` are skipped; of `'a` in `&'a str`, only the tick is skipped.
    fn skip_char_or_lifetime(&mut self) {
        self.step();
        if self.peek(0) == '\\' {
            self.step();
            self.step();
            self.skip_while(|c| c != '\'');
            self.step();
        } else if self.peek(1) == '\'' {
            self.step();
            self.step();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> String {
        let texts: Vec<_> = tokens(source).into_iter().map(|token| token.text).collect();
        texts.join(" ")
    }

    #[test]
    fn comments_and_string_literals_are_not_code() {
        let source = "a /* b /* { */ c */ // d }\n\"e \\\" {\" r#\"f \" {\"# b'{' '{' '\\'' g";
        assert_eq!(words(source), "a g");
    }

    #[test]
    fn lifetimes_are_not_characters() {
        assert_eq!(words("<'a> { 'x' } &'b str"), "< a > { } & b str");
    }

    #[test]
    fn lines_are_counted_through_string_literals() {
        let found = tokens("\"\n\n\" a\n/*\n*/ b");
        assert_eq!((found[0].line, found[1].line), (3, 5));
    }
}
