// Publishes with amqp091-go as its documentation recommends it: persistent, mandatory, and with a
// deferred confirmation each, of which a window's worth may be outstanding. Without confirms, too.
//
// It knows one library and the wire. It must never know what is measured.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log"

	amqp "github.com/rabbitmq/amqp091-go"
)

var hasIds bool

func main() {
	url := flag.String("url", "", "the broker")
	count := flag.Int("count", 0, "how many messages")
	size := flag.Int("size", 1024, "bytes of a body")
	window := flag.Int("window", 1000, "most messages in flight; 0 publishes without confirms")
	flag.BoolVar(&hasIds, "ids", false, "each with a message id and a header that names the attempt")
	flag.Parse()

	connection, err := amqp.Dial(*url)
	check(err)
	channel, err := connection.Channel()
	check(err)
	queues, body := flag.Args(), bytes.Repeat([]byte("x"), *size)
	if *window > 0 {
		confirmed(channel, queues, body, *count, *window)
	} else {
		unconfirmed(channel, queues, body, *count)
	}
	check(channel.Close())
	check(connection.Close()) // answered when the broker has read all of it
}

func confirmed(channel *amqp.Channel, queues []string, body []byte, count int, window int) {
	check(channel.Confirm(false))
	returns := channel.NotifyReturn(make(chan amqp.Return, window))
	outstanding := make(chan *amqp.DeferredConfirmation, window)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for one := range outstanding {
			if !one.Wait() {
				log.Fatalf("not confirmed: %d", one.DeliveryTag)
			}
		}
	}()
	for n := 0; n < count; n++ {
		one, err := channel.PublishWithDeferredConfirmWithContext(
			context.Background(), "", queues[n%len(queues)], true, false, message(body, n))
		check(err)
		outstanding <- one
	}
	close(outstanding)
	<-done
	if len(returns) > 0 {
		log.Fatalf("returned: %d", len(returns))
	}
}

func unconfirmed(channel *amqp.Channel, queues []string, body []byte, count int) {
	for n := 0; n < count; n++ {
		check(channel.PublishWithContext(
			context.Background(), "", queues[n%len(queues)], false, false, message(body, n)))
	}
}

func message(body []byte, n int) amqp.Publishing {
	if !hasIds {
		return amqp.Publishing{DeliveryMode: amqp.Persistent, Body: body}
	}
	return amqp.Publishing{
		DeliveryMode: amqp.Persistent,
		Body:         body,
		MessageId:    fmt.Sprintf("5f0c3a52-9d1e-4b7a-a1c2-%012x", n),
		Headers:      amqp.Table{"rp-attempt": int64(1_203_000_000_000_000 + n)},
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
