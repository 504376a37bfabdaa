#include "stream.h"

#include <algorithm>

namespace hotset {

Stream::~Stream() {
    forget_parent();
    for (Piece& piece : pieces_) drop(piece);
}

int Stream::add_piece(std::vector<Part> parts) {
    Piece piece;
    for (const Part& part : parts) piece.room += room_for_pages(part.bytes);
    piece.parts = std::move(parts);
    piece.batch = std::make_unique<Reader::Batch>();
    piece.batch->ahead = true;
    pieces_.push_back(std::move(piece));
    return n_pieces() - 1;
}

size_t Stream::least_bytes() const {
    size_t largest = 0;
    for (const Piece& piece : pieces_) largest = std::max(largest, piece.room);
    return largest;
}

void Stream::allocate(size_t bytes) {
    memory_ = std::make_shared<Memory>(bytes + kReadAlign);
    ring_ = memory_->data();
    ring_ += (kReadAlign - reinterpret_cast<uintptr_t>(ring_) % kReadAlign) % kReadAlign;
    size_t at = 0;
    for (Piece& piece : pieces_) {
        if (at + piece.room > bytes) at = 0;
        piece.at = at;
        at += piece.room;
    }
    for (int a = 0; a < n_pieces(); a++)
        for (int b = 0; b < n_pieces(); b++)
            if (a != b && pieces_[a].at < pieces_[b].at + pieces_[b].room &&
                pieces_[b].at < pieces_[a].at + pieces_[a].room)
                pieces_[a].sharing.push_back(b);
}

const uint8_t* Stream::data(int piece, int part) const {
    const uint8_t* at = ring_ + pieces_[piece].at;
    const std::vector<Part>& parts = pieces_[piece].parts;
    for (int p = 0; p < part; p++) at += room_for_pages(parts[p].bytes);
    return at + parts[part].offset % kReadAlign;
}

void Stream::begin(Piece& piece) {
    Reader::Batch& batch = *piece.batch;
    batch.reads.clear();
    uint8_t* to = ring_ + piece.at;
    for (const Part& part : piece.parts) {
        add_straight_reads(batch, part.file, part.offset, part.bytes, to);
        to += room_for_pages(part.bytes);
    }
    for (const Read& read : batch.reads) counts_.bytes_read += read.bytes;
    counts_.n_reads += int64_t(batch.reads.size());
    reader_->begin(batch);
    piece.state = State::Coming;
}

// Mark the piece's memory as no longer holding it.
void Stream::drop(Piece& piece) {
    if (piece.state == State::Coming) {
        try {
            reader_->wait(*piece.batch, [] { return true; });
        } catch (const ReadError&) {  // the result is not needed
        }
    }
    piece.state = State::Absent;
}

// Reads that a parent process began never end here, and its threads may hold a lock.
void Stream::forget_parent() {
    if (born_ == n_forks()) return;
    born_ = n_forks();
    for (Piece& piece : pieces_) {
        if (piece.state != State::Coming) continue;
        piece.batch.release();
        piece.batch = std::make_unique<Reader::Batch>();
        piece.batch->ahead = true;
        piece.state = State::Absent;
    }
}

void Stream::read_ahead(int first) {
    forget_parent();
    for (int k = 0; k < n_pieces(); k++) {
        Piece& piece = pieces_[size_t((first + k) % n_pieces())];
        const auto is_needed_before = [&](int other) { return distance(first, other) < k; };
        if (std::any_of(piece.sharing.begin(), piece.sharing.end(), is_needed_before)) return;
        if (piece.state != State::Absent) continue;
        for (const int other : piece.sharing) drop(pieces_[size_t(other)]);
        begin(piece);
    }
}

bool Stream::acquire(int index, const std::function<bool()>& cancelled) {
    read_ahead(index);
    Piece& piece = pieces_[size_t(index)];
    if (piece.state == State::There) return true;
    const int64_t start = now_ns();
    piece.state = State::Absent;  // until the read succeeds
    const bool done = reader_->wait(*piece.batch, cancelled);
    counts_.seconds_waited += double(now_ns() - start) * 1e-9;
    if (done) piece.state = State::There;
    return done;
}

}  // namespace hotset
