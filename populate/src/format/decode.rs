//! Decompression as readers, with limits of memory. All members and frames of a stream are read;
//! bytes after the last one are an error.

use std::io::{self, BufRead, BufReader, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::format::Compression;

/// The largest window of zstd: that of `zstd --long`.
const WINDOW_BYTES: u64 = 128 << 20;
/// The most memory of a decoder of xz. `xz -9` needs 65 MiB.
const XZ_MEMORY_KIB: u32 = 136 << 10;
/// What is read from the connection at once.
const BUFFER_BYTES: usize = 256 << 10;

/// Wraps a reader into a decoder.
pub fn decoder<'a>(compression: Compression, inner: impl Read + 'a) -> Box<dyn Read + 'a> {
    let inner = BufReader::with_capacity(BUFFER_BYTES, inner);
    match compression {
        Compression::None => Box::new(inner),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(inner)),
        Compression::Xz => {
            let reader = lzma_rust2::XzReader::new_mem_limit(inner, true, XZ_MEMORY_KIB);
            Box::new(reader)
        }
        Compression::Zstd => Box::new(Zstd::new(inner)),
    }
}

/// All frames of a stream of zstd.
struct Zstd<R> {
    inner: R,
    decoder: FrameDecoder,
    is_inside: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(inner: R) -> Zstd<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES);
        Zstd {
            inner,
            decoder,
            is_inside: false,
        }
    }

    /// Begins the next frame; false at the end of the stream.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.inner.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.inner) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => skip(&mut self.inner, length.into())?,
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.is_inside = false;
        let stored = self.decoder.get_checksum_from_data();
        match stored.is_none() || stored == self.decoder.get_calculated_checksum() {
            true => Ok(()),
            false => Err(io::Error::other("a frame of zstd has a wrong checksum")),
        }
    }
}

fn skip(inner: &mut impl Read, length: u64) -> io::Result<()> {
    match io::copy(&mut inner.take(length), &mut io::sink())? == length {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_inside {
                self.is_inside = self.next_frame()?;
                if !self.is_inside {
                    return Ok(0);
                }
            }
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(into);
            }
            if self.decoder.is_finished() {
                self.end_frame()?;
                continue;
            }
            let one = BlockDecodingStrategy::UptoBlocks(1);
            self.decoder
                .decode_blocks(&mut self.inner, one)
                .map_err(io::Error::other)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn decoded(compression: Compression, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        decoder(compression, bytes)
            .read_to_end(&mut all)
            .map(|_| all)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).expect("it is compressed");
        encoder.finish().expect("it is compressed")
    }

    /// A frame of zstd with one block that is stored, and its window as given.
    fn zstd(bytes: &[u8], window: u8) -> Vec<u8> {
        let block = (bytes.len() as u32) << 3 | 1;
        let header = [0x28, 0xb5, 0x2f, 0xfd, 0, window];
        [&header[..], &block.to_le_bytes()[..3], bytes].concat()
    }

    /// "hello", compressed by xz 5.4.
    const XZ: &[u8] = b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4F\x02\0!\x01\x16\0\0\0t/\xe5\xa3\x01\0\x04hello\0\0\0\0\xb17\xb9\xdb\xe5\xda\x1e\x9b\0\x01\x1d\x05\xb8-\x80\xaf\x1f\xb6\xf3}\x01\0\0\0\0\x04YZ";

    #[test]
    fn all_members_and_frames_are_read() {
        let twice = |one: Vec<u8>, two: Vec<u8>| [one, two].concat();
        let gz = twice(gzip(b"ab"), gzip(b"cd"));
        assert_eq!(decoded(Compression::Gzip, &gz).expect("gzip"), b"abcd");
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        let zst = [zstd(b"ab", 0x58), skipped, zstd(b"cd", 0x58)].concat();
        assert_eq!(decoded(Compression::Zstd, &zst).expect("zstd"), b"abcd");
        assert_eq!(decoded(Compression::Xz, XZ).expect("xz"), b"hello");
        let xz = twice(XZ.to_vec(), XZ.to_vec());
        assert_eq!(decoded(Compression::Xz, &xz).expect("xz"), b"hellohello");
        assert_eq!(decoded(Compression::None, b"ab").expect("nothing"), b"ab");
    }

    #[test]
    fn a_stream_that_ends_early_or_goes_on_is_refused() {
        let whole = [
            (Compression::Gzip, gzip(b"abcdef")),
            (Compression::Zstd, zstd(b"abcdef", 0x58)),
            (Compression::Xz, XZ.to_vec()),
        ];
        for (compression, bytes) in whole {
            for length in 1..bytes.len() {
                assert!(
                    decoded(compression, &bytes[..length]).is_err(),
                    "{compression:?} {length}"
                );
            }
            let more = [&bytes[..], b"garbage!"].concat();
            assert!(decoded(compression, &more).is_err(), "{compression:?}");
        }
    }

    /// Forty lines, compressed by `xz` and by `zstd -19 --check`.
    const LINES_XZ: &[u8] =
        b"\xfd7zXZ\0\0\x04\xe6\xd6\xb4F\x02\0!\x01\x16\0\0\0t/\xe5\xa3\xe0\x02\xa0\0s]\0\x18\x0e\
        \x80&j\xa3\xdf\r\xccE\x9c&\x89|I\xf3\xbc\tT$\xd8\xb8\xbe\x9e\xb4V\x0c:\x0e\x08\x99X60\
        \xbapf\x0eD\xdc\x1c\xc7u\x9a\xb7\x08\xd9\xeck+0k\xa7>W\xd9\xf6\x95\xc5]v\xbbQ\x08\x8c\
        \xf2W\xf6\xde\"gw\xca\x99\xd4m>\x9c\x91|H\xb4\x98\xf8\xb3#\x80\x10\xa7\x87.\xe5\x84~vO\
        \xa3\x8d\xeen&y\xe9\xae\xec\xe6\x14\x04p|\xe7\x91*\xf6\0\0\0\x0e0\xfeq\xb5\x0f/\xa5\0\
        \x01\x8f\x01\xa1\x05\0\0\xeb\xe7\xcf\xe2\xb1\xc4g\xfb\x02\0\0\0\0\x04YZ";
    const LINES_ZSTD: &[u8] =
        b"(\xb5/\xfdd\xa1\x01\xc5\x02\0\x12\x05\x0e\x10\xc0\xeb\xb0\xe3\xbf\x18\x11I\x92LR\xe6\xa1\
        \xc0\xb9\x01\xff\xb1=\xeb\x13\xab|\x88\xa4\xee8\xcein\xdaO\xbb\xea\x20f\x97\xf5Z\x11b\
        \x97\x15\xfd\xf4\xed\xeaM\x17\x88\x84\x909\xa1\x8c(\xa8\x20\x88o\x07\xa0\x1b\x0e\x10\x14\
        \xe1\xfb\x0670\xc1\xda\xce\x8a*L\xb68ic\x81\x9d\x02zI\0\xa5";

    fn lines() -> Vec<u8> {
        let line = |number: u32| format!("{}: hello, hello\n", number * number % 97);
        (0..40).map(line).collect::<String>().into_bytes()
    }

    /// Mutated streams end, with the content of the seeds where a checksum verifies it, or with an error.
    fn fuzz(name: &str, compression: Compression, seeds: &[Vec<u8>], is_verified: bool) {
        /// More than any mutation of these seeds should become.
        const MOST: u64 = 64 << 20;
        let content = lines();
        let read = |bytes: &[u8]| {
            let mut all = Vec::new();
            let mut reader = decoder(compression, bytes).take(MOST);
            let is_whole = reader.read_to_end(&mut all).is_ok();
            (is_whole, all)
        };
        for seed in seeds {
            assert_eq!(read(seed), (true, content.clone()));
        }
        let target = |bytes: &[u8]| {
            let (is_whole, all) = read(bytes);
            assert!((all.len() as u64) < MOST);
            let mut members = all.chunks(content.len());
            let is_same = members.all(|member| member == content);
            assert!(!is_whole || !is_verified || is_same);
        };
        slackwater_core::fuzz::fuzz(name, seeds, target, |bytes| {
            let (is_whole, all) = read(bytes);
            assert!(is_whole || all.is_empty());
        });
    }

    #[test]
    fn fuzz_gzip() {
        let half = lines().len() / 2;
        let two = [gzip(&lines()[..half]), gzip(&lines()[half..])].concat();
        let seeds = [gzip(&lines()), two];
        fuzz("gzip", Compression::Gzip, &seeds, false);
        fuzz("gzip of one member", Compression::Gzip, &seeds[..1], true);
    }

    #[test]
    fn fuzz_xz() {
        fuzz("xz", Compression::Xz, &[LINES_XZ.to_vec()], true);
    }

    /// The flag of the checksum is not protected itself.
    #[test]
    fn fuzz_zstd() {
        let seeds = [LINES_ZSTD.to_vec(), zstd(&lines(), 0x58)];
        fuzz("zstd", Compression::Zstd, &seeds, false);
    }

    #[test]
    fn large_windows_are_refused() {
        // An exponent of 17 above 2^10 is 128 MiB, the limit.
        assert_eq!(
            decoded(Compression::Zstd, &zstd(b"a", 17 << 3)).expect("it fits"),
            b"a"
        );
        for window in [17 << 3 | 1, 18 << 3, 31 << 3 | 7] {
            assert!(
                decoded(Compression::Zstd, &zstd(b"a", window)).is_err(),
                "{window}"
            );
        }
    }
}
