// A broker that keeps nothing: it confirms what it has read, all at once, and costs a processor
// next to nothing. What publishers reach with it is what they can do themselves.
//
// It prints its port. It knows the frames of AMQP 0-9-1. It must never know what is measured.
package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
)

const (
	method, header, body, heartbeat = 1, 2, 3, 8
	frameEnd                        = 0xCE
	frameMax                        = 131072
	buffered                        = 1 << 20
)

var order = binary.BigEndian

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	for {
		one, err := listener.Accept()
		check(err)
		go serve(one)
	}
}

// channel is what was published on a channel: the newest tag, what is confirmed, what is still to come.
type channel struct{ tag, confirmed, missing uint64 }

type connection struct {
	in       *bufio.Reader
	out      *bufio.Writer
	channels map[uint16]*channel
}

func serve(one net.Conn) {
	defer one.Close()
	it := &connection{
		bufio.NewReaderSize(one, buffered), bufio.NewWriter(one), map[uint16]*channel{},
	}
	if _, err := it.in.Discard(len("AMQP0091")); err != nil {
		return
	}
	it.send(0, 10, 10, start())
	for {
		if it.in.Buffered() == 0 { // all that has come is read
			it.confirm()
			if it.out.Flush() != nil {
				return
			}
		}
		if !it.frame() {
			it.out.Flush()
			return
		}
	}
}

// frame reads one; false at the end of the connection.
func (it *connection) frame() bool {
	var head [7]byte
	if _, err := io.ReadFull(it.in, head[:]); err != nil {
		return false
	}
	number, size := order.Uint16(head[1:]), int(order.Uint32(head[3:]))
	if head[0] == body {
		it.channels[number].missing -= uint64(size)
		it.completed(number)
		_, err := it.in.Discard(size + 1)
		return err == nil
	}
	payload := make([]byte, size+1)
	if _, err := io.ReadFull(it.in, payload); err != nil {
		return false
	}
	switch head[0] {
	case header:
		it.channels[number].missing = order.Uint64(payload[4:])
		it.completed(number)
	case heartbeat:
		it.out.Write([]byte{heartbeat, 0, 0, 0, 0, 0, 0, frameEnd})
	case method:
		return it.method(number, order.Uint16(payload), order.Uint16(payload[2:]))
	}
	return true
}

// completed counts a message once its last byte is announced by what was read.
func (it *connection) completed(number uint16) {
	if one := it.channels[number]; one.missing == 0 {
		one.tag++
	}
}

func (it *connection) method(number, class, id uint16) bool {
	switch [2]uint16{class, id} {
	case [2]uint16{10, 11}: // connection.start-ok: tune
		it.send(0, 10, 30, pack(uint16(2047), uint32(frameMax), uint16(60)))
	case [2]uint16{10, 40}: // connection.open
		it.send(0, 10, 41, []byte{0})
	case [2]uint16{10, 50}: // connection.close
		it.confirm()
		it.send(0, 10, 51, nil)
		return false
	case [2]uint16{20, 10}: // channel.open
		it.channels[number] = &channel{}
		it.send(number, 20, 11, make([]byte, 4))
	case [2]uint16{20, 40}: // channel.close
		it.confirm()
		delete(it.channels, number)
		it.send(number, 20, 41, nil)
	case [2]uint16{85, 10}: // confirm.select
		it.send(number, 85, 11, nil)
	case [2]uint16{10, 31}, [2]uint16{60, 40}, [2]uint16{20, 41}: // tune-ok, publish, close-ok
	default:
		log.Fatalf("method %d.%d is not for a sink", class, id)
	}
	return true
}

func (it *connection) confirm() {
	for number, one := range it.channels {
		if one.tag > one.confirmed {
			it.send(number, 60, 80, pack(one.tag, true)) // basic.ack, multiple
			one.confirmed = one.tag
		}
	}
}

func (it *connection) send(number, class, id uint16, arguments []byte) {
	it.out.Write(pack(byte(method), number, uint32(4+len(arguments)), class, id))
	it.out.Write(arguments)
	it.out.WriteByte(frameEnd)
}

// start has what clients look for before they ask for confirms.
func start() []byte {
	var can []byte
	for _, name := range []string{"publisher_confirms", "basic.nack", "connection.blocked"} {
		can = append(append(can, short(name)...), 't', 1)
	}
	properties := append(append(short("capabilities"), 'F'), long(string(can))...)
	arguments := append([]byte{0, 9}, long(string(properties))...)
	return append(append(arguments, long("PLAIN")...), long("en_US")...)
}

func short(text string) []byte { return append([]byte{byte(len(text))}, text...) }

func long(text string) []byte { return append(pack(uint32(len(text))), text...) }

func pack(values ...any) []byte {
	var packed bytes.Buffer
	for _, value := range values {
		check(binary.Write(&packed, order, value))
	}
	return packed.Bytes()
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
