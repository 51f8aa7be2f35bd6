//! The formats of content: which one it is, by its first bytes, and readers of each. Nothing here opens or
//! writes a file.

pub mod archive;
pub mod decode;
pub mod name;
pub mod qcow2;

use serde::Deserialize;

/// How many bytes of the beginning decide: a header of tar has its magic at 257.
pub const HEAD_BYTES: usize = 512;

/// What surrounds the content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Xz,
    Zstd,
}

/// The content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Blocks of a disk, as they are.
    Raw,
    Qcow2,
    Tar,
}

impl Compression {
    pub fn of(head: &[u8]) -> Compression {
        let zstd_frame = head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
        // A frame that decoders skip may be the first one.
        let skipped = matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
        match head {
            [0x1f, 0x8b, 0x08, ..] => Compression::Gzip,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Compression::Xz,
            _ if zstd_frame || skipped => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

impl Format {
    pub fn of(head: &[u8]) -> Format {
        // An archive of tar without any entry is two blocks of zeros: nothing marks it as one.
        match head.get(257..262) == Some(b"ustar") {
            true => Format::Tar,
            false if head.starts_with(b"QFI\xfb") => Format::Qcow2,
            false => Format::Raw,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognized_by_their_magic() {
        let compression = |bytes: &[u8]| Compression::of(bytes);
        assert_eq!(compression(&[0x1f, 0x8b, 8, 0]), Compression::Gzip);
        assert_eq!(compression(b"\xfd7zXZ\0\0"), Compression::Xz);
        assert_eq!(compression(&[0x28, 0xb5, 0x2f, 0xfd]), Compression::Zstd);
        assert_eq!(compression(&[0x5a, 0x2a, 0x4d, 0x18]), Compression::Zstd);
        for other in [
            &[][..],
            &[0x1f],
            &[0x1f, 0x8b],
            b"\xfd7zX",
            &[0x28, 0xb5],
            &[0; 512],
        ] {
            assert_eq!(compression(other), Compression::None, "{other:?}");
        }
        let mut head = [0; HEAD_BYTES];
        assert_eq!(Format::of(&head), Format::Raw);
        head[257..262].copy_from_slice(b"ustar");
        assert_eq!(Format::of(&head), Format::Tar);
        assert_eq!(Format::of(&head[..261]), Format::Raw);
        assert_eq!(Format::of(b"QFI\xfb\0\0\0\x03"), Format::Qcow2);
        assert_eq!(Format::of(b""), Format::Raw);
    }
}
